"""What a daemon and a client that have nothing to do cost: processes as a user starts them, a tiny model, one attached
client that has computed and then does nothing. Their CPU time is the scheduler's own count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from syshax import Client
from syshax.errors import InternalError
from syshaxd.bench import processes
from syshaxd.bench.spinning import used_seconds

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 64, 96, 4, 2, 2
SETTLE_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
REQUESTS = 200


def measure(seconds: float) -> dict[str, float]:
    """idle_daemon and idle_client: parts of one CPU, from one second after the last request on. Raises SyshaxError."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sx")))
        write_checkpoint(base / "model")
        (base / "config.toml").write_text(f"[models.idle]\npath = {json.dumps(str(base / 'model'))}\nautoload = true\n")
        directories = ["--runtime-dir", str(base / "run"), "--state-dir", str(base / "state")]
        daemon = start(stack, "syshaxd", "--user", *directories, "--config", str(base / "config.toml"))
        client = start(stack, "syshaxd.bench.idling", str(base / "run"))
        assert client.stdout is not None
        if client.stdout.readline() != "ready\n":
            raise InternalError("the idle benchmark's client did not attach", "does `syshaxd --user` start?")
        time.sleep(SETTLE_SECONDS)
        before, begin = [used_seconds(process.pid) for process in (daemon, client)], time.monotonic()
        time.sleep(seconds)
        after, took = [used_seconds(process.pid) for process in (daemon, client)], time.monotonic() - begin
        parts = [(late - early) / took for early, late in zip(before, after, strict=True)]
        return {"idle_daemon": round(parts[0], 5), "idle_client": round(parts[1], 5)}


def start(stack: ExitStack, module: str, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"SYSHAX_CACHE_ENABLED": "false"}
    return processes.start(stack, module, *words, stderr=subprocess.DEVNULL, environment=environment)


def write_checkpoint(folder: Path) -> None:
    """Random experts of a Mixtral with two small layers: config.json and model.safetensors, nothing else."""
    folder.mkdir()
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
    header, data = {}, b""
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, shape in shapes.items():
                values = random.standard_normal(shape, np.float32).tobytes()
                offsets = [len(data), len(data) + len(values)]
                entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
                header[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = entry
                data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def be_client(runtime_dir: str) -> None:
    """Attaches as soon as the daemon has loaded the model, computes, says so, and waits to be stopped."""
    model = Client(runtime_dir).open("idle", wait=PATIENCE_SECONDS)
    states = np.ones((1, HIDDEN), np.float32)
    ids, weights = np.zeros((1, TOP_K), np.int32), np.full((1, TOP_K), 1 / TOP_K, np.float32)
    for request in range(REQUESTS):
        model.moe(request % LAYERS, states, ids, weights)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    be_client(sys.argv[1])
