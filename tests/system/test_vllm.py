"""The whole path under systemd, with real vLLM in the worker's unit: HTTP client, front-end, worker, daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import ROOT, Box
from conftest import TinyModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
MODEL, VLLM = "/srv/models/chat", "/opt/vllm"
WORKER = "syshax-worker@chat.service"
ENVIRONMENT = f"""WORKER_MODEL={MODEL}
WORKER_PYTHON={VLLM}/bin/python
WORKER_OPTIONS="--port 8001 --dtype float32 --max-model-len 256 --enforce-eager"
HF_HUB_OFFLINE=1
VLLM_NO_USAGE_STATS=1
"""
ASK = """
import json, sys, urllib.request
body = {"model": "chat", "prompt": "A line of text", "max_tokens": 8, "temperature": 0}
ask = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                             {"content-type": "application/json"})
print(urllib.request.urlopen(ask, timeout=120).read().decode())
"""

READY = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8000/ready", timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture
def serving(layer: Path, tiny: TinyModel) -> Iterator[Box]:
    """The box with vLLM's environment in it; its interpreter may lie where only root looks."""
    subprocess.run([sys.executable, ROOT / "tests/models.py", "qwen3_moe", layer / MODEL.lstrip("/")], check=True)
    with Box("vllm", layer, shown={sys.prefix: VLLM}) as box:
        for folder in [*Path(sys.base_prefix).parents, Path(MODEL)]:
            box.run("chmod", "a+x", str(folder))
        box.run("chmod", "-R", "a+rX", MODEL)
        config = f'[models.chat]\npath = "{MODEL}"\nformat = "bf16"\n'
        box.write("/etc/syshax/syshaxd.toml.d/chat.toml", config)
        box.systemctl("reload", "syshaxd.service")
        box.write("/etc/syshax/workers/chat.env", ENVIRONMENT)
        box.write("/etc/syshax/syshax-api.toml.d/chat.toml", 'workers = ["http://127.0.0.1:8001"]\n')
        yield box


def answer(box: Box) -> str:
    text: str = json.loads(box.run("/usr/bin/python3", "-c", ASK, user="carol", timeout=180))["choices"][0]["text"]
    return text


def test_text_through_all_of_it_and_over_a_restart(serving: Box) -> None:
    serving.systemctl("start", WORKER, "syshax-api.socket")
    started = lambda: "Application startup complete" in serving.journal(WORKER)  # noqa: E731
    serving.wait("vLLM", lambda: started() or not serving.is_active(WORKER), 500)
    assert started(), serving.journal(WORKER)[-5000:]
    pid, first = serving.main_pid(WORKER), answer(serving)
    assert first
    serving.systemctl("restart", "syshaxd.service")
    assert answer(serving) == first
    serving.run("kill", "-KILL", str(serving.main_pid()))
    assert answer(serving) == first
    stays_stopped_and_comes_back(serving)
    assert answer(serving) == first
    assert serving.main_pid(WORKER) == pid and serving.show(WORKER, "NRestarts") == "0"


def stays_stopped_and_comes_back(box: Box) -> None:
    """With a worker that nobody asks anything, longer than the front-end sends it any."""
    is_ready = lambda: box.run("/usr/bin/python3", "-c", READY).strip() == "200"  # noqa: E731
    assert is_ready()
    box.systemctl("stop", "syshaxd.service")
    time.sleep(40)
    assert box.show("syshaxd.service", "ActiveState") == "inactive", "the idle worker started it"
    assert not is_ready()
    box.systemctl("start", "syshaxd.service")
    box.wait("the idle worker has attached again", is_ready)
