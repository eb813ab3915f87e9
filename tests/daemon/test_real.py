"""The daemon as users start it, with the compiled core: numbers, memory, signals, crashes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint

from syshax import Client
from syshax.control import Control
from syshax.errors import CheckpointError, DaemonAbsentError
from syshax.protocol import BOOT_FILE, LoadRequest, ModelInfo, SessionsAnswer, StatusAnswer
from syshax.sockets import daemon_boot
from syshaxd import loader
from syshaxd.config import ComputeConfig
from syshaxd.core import compiled_core
from syshaxd.loader import LoadProgress
from syshaxd.machine import Machine
from syshaxd.planner import make_plan


class Process:
    """A daemon process of the test's own."""

    def __init__(self, runtime_dir: Path, *arguments: str | Path, **environment: str) -> None:
        self.runtime_dir, self.control = runtime_dir, Control(runtime_dir)
        command = [sys.executable, "-m", "syshaxd", "--user", "--runtime-dir", runtime_dir, "--state-dir",
                   runtime_dir.parent / "state", *arguments]  # fmt: skip
        self.log = runtime_dir.parent / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        for _ in range(300):
            with contextlib.suppress(DaemonAbsentError):
                self.control.get("/v1/status", StatusAnswer)
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def load(self, name: str, path: Path, format: str) -> ModelInfo:
        self.control.post("/v1/models", LoadRequest(name=name, path=str(path), format=format), ModelInfo)
        while (info := self.control.get(f"/v1/models/{name}", ModelInfo)).state == "loading":
            time.sleep(0.02)
        assert info.state == "ready", info.reason
        return info

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


@pytest.fixture
def real(short_dir: Path) -> Iterator[Process]:
    daemon = Process(short_dir / "run")
    daemon.wait_ready()
    yield daemon
    if daemon.process.poll() is None:
        daemon.end()


def reference(experts: list[tuple[np.ndarray, ...]], x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The layer in float64, expert by expert."""
    out = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert >= 0:
                gate, up, down = experts[expert]
                inner = gate @ row
                out[token] += weight * (down @ (inner / (1 + np.exp(-inner)) * (up @ row)))
    return out


TOLERANCE = {"bf16": 1e-5, "fp16": 1e-5, "q8_0": 0.02, "q4_0": 0.2}
"""Of the largest output: stored exactly, or within the format's step."""


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_client_gets_what_the_checkpoint_says(real: Process, tmp_path: Path, architecture: str) -> None:
    tensors = write_checkpoint(tmp_path, architecture, shards=2)
    blueprint = loader.inspect(tmp_path, "bf16")
    random = np.random.default_rng(1)
    for format, tolerance in TOLERANCE.items():
        info = real.load(f"m-{format}", tmp_path, format)
        assert info.architecture == architecture and info.fingerprint == blueprint.fingerprint
        with Client(real.runtime_dir) as client:
            model = client.open(f"m-{format}", fingerprint=blueprint.fingerprint)
            for layer in range(2):
                names = [blueprint.architecture.tensor_names(layer, expert) for expert in range(4)]
                experts = [tuple(tensors[f"{name}.weight"] for name in row) for row in names]
                x = random.standard_normal((5, 64)).astype(np.float32)
                ids = np.array([[0, 1], [2, 3], [3, -1], [1, 0], [2, 1]], np.int32)
                weights = random.random((5, 2)).astype(np.float32)
                expected = reference(experts, x, ids, weights)
                error = np.abs(model.moe(layer, x, ids, weights) - expected).max() / np.abs(expected).max()
                assert error < tolerance, (format, layer)
        assert real.control.get(f"/v1/models/m-{format}", ModelInfo).forward_calls == 2
    status = real.control.get("/v1/status", StatusAnswer)
    assert status.requests_completed == 8 and status.requests_failed == 0 and status.tokens == 40
    assert status.pool_bytes == sum(node.pool_bytes for node in status.nodes)


def test_a_killed_daemon_leaves_nothing_in_the_way_and_clients_come_back(real: Process, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    real.load("m", tmp_path / "m", "bf16")
    with Client(real.runtime_dir) as client:
        model = client.open("m")
        x, ids, weights = np.ones((1, 64), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
        first = model.moe(0, x, ids, weights)
        real.end(signal.SIGKILL)
        again = Process(real.runtime_dir)
        again.wait_ready()
        again.load("m", tmp_path / "m", "bf16")
        np.testing.assert_array_equal(model.moe(0, x, ids, weights, reconnect_s=20), first)
        again.end()


def test_killed_and_stopped_clients_lose_their_lease(real: Process, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    real.load("m", tmp_path / "m", "bf16")
    code = (
        f"import time; from syshax import Client; model = Client({str(real.runtime_dir)!r}).open('m'); "
        "print(1, flush=True); time.sleep(60)"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None and client.stdout.readline() == b"1\n"
    (session,) = real.control.get("/v1/sessions", SessionsAnswer).sessions
    assert session.pid == client.pid and not session.stale
    client.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not real.control.get("/v1/sessions", SessionsAnswer).sessions[0].stale:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    client.kill()
    client.wait()
    client.stdout.close()
    while real.control.get("/v1/sessions", SessionsAnswer).sessions:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def resident(pid: int) -> int:
    """Bytes of anonymous and shared memory; page cache that is mapped does not count."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10


@pytest.mark.parametrize("format", ["bf16", "q4_0"])
def test_loading_takes_little_more_than_the_pool(real: Process, tmp_path: Path, format: str) -> None:
    write_checkpoint(tmp_path / "warm")
    real.load("warm", tmp_path / "warm", format)  # threads and buffers of the first load are not the model's
    size = {"num_hidden_layers": 2, "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32}
    write_checkpoint(tmp_path / "m", **size)
    before, peak, done = resident(real.process.pid), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident(real.process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    info = real.load("m", tmp_path / "m", format)
    done.set()
    watcher.join()
    pool = sum(info.node_bytes.values())
    assert pool == info.progress.bytes_total >= 100_663_296 * {"bf16": 2, "q4_0": 18 / 32}[format]
    assert peak - before <= 1.10 * pool, f"{(peak - before) / pool:.3f} x the pool"
    assert resident(real.process.pid) - before >= 0.9 * pool, "the measure sees the pool"


def cpu_seconds(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def test_an_idle_daemon_sleeps(real: Process, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    real.load("m", tmp_path / "m", "bf16")
    with Client(real.runtime_dir) as client:
        client.open("m").moe(0, np.ones((1, 64), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32))
        time.sleep(1)
        before = cpu_seconds(real.process.pid)
        time.sleep(4)
        assert cpu_seconds(real.process.pid) - before < 0.04, "under 1 % of a core"


def test_signals_and_exit_codes(short_dir: Path, tmp_path: Path) -> None:
    daemon = Process(short_dir / "run")
    daemon.wait_ready()
    second = Process(short_dir / "run")
    assert second.process.wait(30) == 3
    assert f"another syshaxd (pid {daemon.process.pid})" in daemon.log.read_text()
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.end(signal.SIGINT) == 0
    assert not list((short_dir / "run").glob("*.sock"))
    (short_dir / "bad.toml").write_text("[compute]\nthreads = 4000\n")
    wrong = Process(short_dir / "run", "--config", short_dir / "bad.toml")
    assert wrong.process.wait(30) == 2
    text = daemon.log.read_text()
    assert "compute.threads = 4000 is more than" in text and "Traceback" not in text


def test_a_second_signal_cuts_the_stop_short(real: Process, tmp_path: Path) -> None:
    """A stop waits for a load in progress to reach the end of its layer; a second signal does not."""
    write_checkpoint(tmp_path / "m", num_hidden_layers=1, hidden_size=1024, moe_intermediate_size=1024, num_experts=24)
    real.control.post("/v1/models", LoadRequest(name="m", path=str(tmp_path / "m"), format="q4_0"), ModelInfo)
    while real.control.get("/v1/models/m", ModelInfo).progress.stage != "converting":
        time.sleep(0.005)
    real.process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    started = time.monotonic()
    code = real.end(signal.SIGTERM)
    assert (code, time.monotonic() - started < 1) in ((130, True), (0, True)), "0: the layer was ready before"
    assert not list(real.runtime_dir.glob("*.sock"))


def test_a_file_says_who_serves_to_those_who_must_not_connect(real: Process) -> None:
    file = real.runtime_dir / BOOT_FILE
    while (status := real.control.get("/v1/status", StatusAnswer)).state == "starting":
        time.sleep(0.005)
    boot = status.boot_id
    assert daemon_boot(real.runtime_dir) == boot and file.stat().st_mode & 0o777 == 0o644
    assert real.end() == 0
    assert daemon_boot(real.runtime_dir) == "" and not file.exists()


def test_systemd_hands_over_sockets(short_dir: Path) -> None:
    made = []
    for name, kind in (("c", socket.SOCK_STREAM), ("a", socket.SOCK_SEQPACKET)):
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(str(short_dir / name))
        listener.listen()
        made.append(listener)
    script = (
        f"exec 3<&{made[0].fileno()} 4<&{made[1].fileno()}; "
        "export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=syshaxd:syshaxd; "
        f"exec {sys.executable} -m syshaxd --user --runtime-dir {short_dir}/run --state-dir {short_dir}/state"
    )
    process = subprocess.Popen(["bash", "-c", script], pass_fds=[listener.fileno() for listener in made])
    try:
        (short_dir / "control.sock").symlink_to(short_dir / "c")
        status = Control(short_dir, timeout=20).get("/v1/status", StatusAnswer)
        assert status.pid == process.pid and status.state == "ready"
        made_here = [path.name for path in (short_dir / "run").glob("*.sock")]
        assert made_here == ["view.sock"], "the view socket is the daemon's own always"
    finally:
        process.terminate()
        assert process.wait(30) == 0
    for listener in made:
        listener.close()


def test_a_file_that_shrinks_while_it_is_read_ends_the_load_not_the_process(tmp_path: Path) -> None:
    core = compiled_core()
    file = tmp_path / "data"
    file.write_bytes(b"\7" * (1 << 20))
    descriptor = os.open(file, os.O_RDONLY)
    mapped: Any = core.GuardedFile(descriptor)
    os.close(descriptor)
    array = np.frombuffer(mapped, np.uint8)
    assert array.sum() == 7 << 20 and not mapped.cut_short() and not array.flags.writeable
    mapped.release(0, 1 << 20)
    os.truncate(file, 4096)
    assert array[1 << 19 :].sum() == 0 and mapped.cut_short()
    del mapped
    assert array[0] == 0, "the array keeps the mapping alive"


def test_a_checkpoint_that_shrinks_while_it_is_converted_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=3, moe_intermediate_size=256)
    core = compiled_core()
    plan = make_plan(core.topology(), ComputeConfig(), Machine.read())
    runtime = core.Runtime([node.as_core_plan() for node in plan.nodes], "", 0, "off", 64)
    blueprint = loader.inspect(tmp_path, "q8_0")
    progress, cancel, file = LoadProgress(), threading.Event(), tmp_path / "model.safetensors"

    class Shrinking:
        """Converts the first layer, then takes the rest of the file away before the second."""

        def __init__(self, model: Any) -> None:
            self.model = model

        def load_layer(self, layer: int, *arguments: Any) -> None:
            if layer == 1:
                os.truncate(file, 4096)
            self.model.load_layer(layer, *arguments)

    class Wrapped:
        def create_model(self, *arguments: Any) -> Any:
            return Shrinking(runtime.create_model(*arguments))

        def drop_model(self, model: Any) -> None:
            runtime.drop_model(model.model)

    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was being loaded"):
        loader.load(core, Wrapped(), blueprint, "m", progress, cancel)  # type: ignore[arg-type]
    assert progress.layers_done == 1
