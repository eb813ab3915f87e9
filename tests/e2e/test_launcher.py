"""syshax-worker as a process, without letting vLLM start: refusals, exit codes, the printed command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from services import Daemon

pytestmark = pytest.mark.vllm


def worker(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syshax.vllm.launcher", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "hint: " in done.stderr
    for text in texts:
        assert text in done.stderr, done.stderr


def test_without_a_daemon(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    start = time.monotonic()
    done = worker(str(checkpoint("mixtral")), "--runtime-dir", str(tmp_path), "--syshax-wait", "1")
    assert_refused(done, 3, str(tmp_path / "control.sock"), "waiting up to 1 s")
    assert time.monotonic() - start < 20


def test_dry_run_needs_no_daemon(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    model = checkpoint("mixtral")
    done = worker(str(model), "--runtime-dir", str(tmp_path), "--dry-run", "--port", "8001")
    assert done.returncode == 0, done.stderr
    for text in (
        str(model),
        "--quantization syshax",
        "--load-format syshax",
        "--port 8001",
        f"SYSHAX_RUNTIME_DIR={tmp_path}",
    ):
        assert text in done.stdout
    assert "no syshaxd" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "MODEL is missing"),
        (["/no/such/model"], 7, "/no/such/model is not a directory"),
        (["MODEL", "--quantization", "fp8"], 2, "compute the experts itself"),
        (["MODEL", "--additional-config", "{"], 2, "not JSON"),
        (["MODEL", "--additional-config", '{"syshax": {"reconect_s": 1}}'], 2, "did you mean reconnect_s?"),
        (["MODEL", "--syshax-format", "q5_0"], 2, 'knows no weight format "q5_0"; it has bf16, fp16, q4_0, q8_0'),
    ],
)
def test_wrong_words(words: list[str], code: int, text: str, daemon: Daemon, checkpoint: Callable[[str], Path]) -> None:
    words = [str(checkpoint("mixtral")) if word == "MODEL" else word for word in words]
    assert_refused(worker(*words, "--dry-run", SYSHAX_RUNTIME_DIR=str(daemon.runtime_dir)), code, text)


def test_plugins_that_leave_syshax_out(checkpoint: Callable[[str], Path]) -> None:
    done = worker(str(checkpoint("mixtral")), "--dry-run", VLLM_PLUGINS="other")
    assert_refused(done, 2, "VLLM_PLUGINS=other")


def test_another_checkpoint_under_that_name(daemon: Daemon, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Loaded by name from one directory, served from another whose experts differ: refused before vLLM starts."""
    runtime = str(daemon.runtime_dir)
    from syshax.protocol import LoadRequest, ModelInfo

    daemon.control.post("/v1/models", LoadRequest(name="m", path=str(checkpoint("mixtral"))), ModelInfo)
    done = worker(str(checkpoint("qwen2_moe")), "--runtime-dir", runtime, "--syshax-model", "m")
    assert_refused(done, 7, "is not the one that syshaxd holds as m")


def test_a_checkpoint_that_the_daemon_refuses(
    daemon: Daemon, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint("mixtral").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = broken / "model-00001-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    done = worker(str(broken), "--runtime-dir", str(daemon.runtime_dir))
    assert_refused(done, 7, shard.name)
