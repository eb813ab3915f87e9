"""Real daemons that are killed and stopped while clients send requests: no wrong answer, none lost, nothing read again.

SYSHAX_RESTART_ROUNDS sets the number of rounds of the crash test.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from service_manager import ServiceManager

from syshax import Client
from syshax.protocol import Geometry
from syshaxd import _core
from syshaxd.keeping import arena_name, manifest_file, manifest_name
from syshaxd.manifest import ArenaFacts, core_geometry, from_bytes
from syshaxd.status import version

ROUNDS = int(os.environ.get("SYSHAX_RESTART_ROUNDS", "10"))


@pytest.fixture
def manager(short_dir: Path) -> Iterator[ServiceManager]:
    with ServiceManager(short_dir) as made:
        yield made


def configured(path: Path, format: str = "q8_0", autoload: str = "true") -> str:
    return f'[models.m]\npath = "{path}"\nformat = "{format}"\nautoload = {autoload}\n'


class Work:
    """Requests of one client with the answers that they must have, sent again and again by threads."""

    def __init__(self, manager: ServiceManager, hidden: int, experts: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.client = Client(manager.runtime_dir)
        self.model = self.client.open("m", max_tokens=32, num_slots=2, wait=20)
        self.requests = []
        for tokens in (1, 5, 32, 70):  # the last is cut into three pieces
            x = random.standard_normal((tokens, hidden)).astype(np.float32)
            ids = random.integers(-1, experts, (tokens, 2)).astype(np.int32)
            self.requests.append((tokens % 2, x, ids, random.random((tokens, 2)).astype(np.float32)))
        self.answers = [self.model.moe(*request) for request in self.requests]
        self.done, self.wrong, self.failed = 0, 0, []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(first,)) for first in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, place: int) -> None:
        while not self._stop.is_set():
            place = (place + 1) % len(self.requests)
            try:
                got = self.model.moe(*self.requests[place], timeout=120, reconnect_s=60)
            except Exception as error:  # noqa: BLE001  (whatever it is, the test fails with it)
                self.failed.append(error)
                return
            self.wrong += not np.array_equal(got, self.answers[place])
            self.done += 1

    def progress(self) -> None:
        """Waits until both threads have had an answer from the daemon that is there now."""
        enough, deadline = self.done + 4, time.monotonic() + 60
        while self.done < enough and not self.failed:
            assert time.monotonic() < deadline, "requests do not come to an end"
            time.sleep(0.002)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()
        self.client.close()
        assert not self.failed and self.wrong == 0, (self.failed, self.wrong)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.timeout(200 + 10 * ROUNDS)
def test_rounds_of_crashes_lose_no_request(manager: ServiceManager, tmp_path: Path) -> None:
    """kill -9 while computing, while starting, and orderly stops, at any moment. The checkpoint is gone: nothing of it
    can be read again."""
    dice = random.Random(ROUNDS)
    write_checkpoint(tmp_path / "m", hidden_size=128, moe_intermediate_size=192, num_experts=8)
    manager.configure(configured(tmp_path / "m"))
    manager.start()
    manager.until_ready("m")
    names = manager.names()
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    workers = [Work(manager, 128, 8, seed) for seed in range(2)]
    files = []
    for number in range(ROUNDS):
        time.sleep(dice.random() * 0.2)
        if number % 3 == 2:  # the new one is killed at some point of its start
            manager.end(signal.SIGKILL)
            manager.start(wait=False)
            time.sleep(dice.random() * 1.5)
            manager.end(signal.SIGKILL)
            manager.start()
        else:
            how = signal.SIGTERM if number % 3 == 1 else signal.SIGKILL
            assert manager.restart(how) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        for work in workers:
            work.progress()
        assert manager.process is not None
        files.append(open_files(manager.process.pid))
    assert manager.model("m").origin == "restart"
    for work in workers:
        work.end()
    assert manager.names() == names and max(files) - min(files) <= 4, files
    assert "Traceback" not in manager.log()


def killed_at_stage(manager: ServiceManager, stage: str) -> None:
    deadline = time.monotonic() + 30
    while manager.model("m").progress.stage != stage:
        assert time.monotonic() < deadline, stage
        time.sleep(0.001)
    manager.end(signal.SIGKILL)


def test_a_crash_while_loading_leaves_no_half_model(manager: ServiceManager, tmp_path: Path) -> None:
    """At the stages that can be seen from outside, and at each message to the service manager."""
    write_checkpoint(tmp_path / "m", num_hidden_layers=24, hidden_size=256, moe_intermediate_size=256, num_experts=16)
    manager.configure(configured(tmp_path / "m", autoload="false"))
    manager.start()
    reference = manager.load("m", tmp_path / "m", "q8_0")
    with Client(manager.runtime_dir) as client:
        model = client.open("m")
        request = (
            0,
            np.ones((3, 256), np.float32),
            np.array([[0, 1], [2, 3], [-1, 15]], np.int32),
            np.ones((3, 2), "f4"),
        )
        expected = model.moe(*request)
        model.close()
        for name in ("manifest", "arena", None):
            manager.control.delete("/v1/models/m?force=1")
            while manager.store:
                time.sleep(0.001)
            if name is None:
                manager.load_begin("m", tmp_path / "m", "q8_0")
                killed_at_stage(manager, "converting")
            else:
                manager.kill_when = lambda message, name=name: message.get("FDNAME", "").startswith(f"syshax-{name}")
                manager.load_begin("m", tmp_path / "m", "q8_0")
                assert manager.process is not None and manager.process.wait(60) == -signal.SIGKILL
            assert len(manager.store) == (1 if name == "manifest" else 0)
            manager.start()
            if name == "manifest":  # it is known that somebody wanted it
                assert manager.until_ready("m").origin == "checkpoint"
            else:
                assert manager.model("m").state == "configured"
                manager.load("m", tmp_path / "m", "q8_0")
            with client.open("m", fingerprint=reference.fingerprint) as model:
                np.testing.assert_array_equal(model.moe(*request), expected)
            assert len(manager.store) == 2


def test_syshaxctl_restart(manager: ServiceManager, tmp_path: Path) -> None:
    """The command returns when the next daemon serves; requests meanwhile come to their ends."""
    write_checkpoint(tmp_path / "m", hidden_size=128, moe_intermediate_size=192, num_experts=8)
    manager.start()
    manager.load("m", tmp_path / "m", "q8_0")
    work = Work(manager, 128, 8, 1)
    for options in (["--drain"], []):
        command = [sys.executable, "-m", "syshax.ctl", "--runtime-dir", manager.runtime_dir, "restart", *options]
        ctl = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        assert manager.process is not None
        before = manager.process.pid
        assert manager.process.wait(60) == 75
        manager.start()
        said, _ = ctl.communicate(timeout=60)
        assert ctl.returncode == 0 and manager.process.pid != before
        assert said == f"syshaxd {version()} serves again (pid {manager.process.pid}): 1 models were kept\n"
        work.progress()
    work.end()


def bytes_read(pid: int) -> int:
    """What read() and its like brought in; page faults in mapped files are not in it."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def cpu_seconds(pid: int) -> float:
    """Of all threads since the process began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def put_blank_model(manager: ServiceManager, like: str, name: str, geometry: Geometry) -> int:
    """Puts a model of zeros into the store, as a daemon would have kept it. Its bytes."""
    (manifest,) = [held for stored, held in manager.of_kind("manifest") if stored.endswith(f".{like}")]
    packed = from_bytes(os.pread(manifest, 1 << 20, 0))
    nodes = [{"node": -1, "cpus": [], "threads": 1, "share": node.share} for node in packed.nodes]
    sizes = _core.Runtime.plan_bytes(core_geometry(geometry), packed.format, nodes)
    changes = {"name": name, "geometry": geometry, "generation": "0" * 16}
    packed = packed.model_copy(
        update=changes | {"arenas": tuple(ArenaFacts(index=index, bytes=size) for index, size in enumerate(sizes))}
    )
    for index, size in enumerate(sizes):
        arena = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        os.posix_fallocate(arena, 0, size)
        fcntl.fcntl(arena, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10)
        manager.put(arena_name(packed, index), arena)
    manager.put(manifest_name(packed), manifest_file(packed))
    return sum(sizes)


def test_ready_comes_soon_whatever_the_size(manager: ServiceManager, tmp_path: Path) -> None:
    """From exec to READY, best of three: with a model of 2 GiB, and with a small one. Weights are not read. A start is
    one thing after the other, so on a machine that is busy otherwise its CPU time counts instead."""
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 2}
    write_checkpoint(tmp_path / "small", **shape)
    manager.start()
    manager.load("small", tmp_path / "small", "bf16")
    times: dict[str, list[float]] = {"small": [], "large": []}
    for which in times:
        if which == "large":
            layers = list(range(6))
            geometry = Geometry(
                num_layers=6, num_experts=64, hidden_size=1024, intermediate_size=1024, top_k=2, layer_ids=layers
            )
            assert put_blank_model(manager, "small", "large", geometry) > 2 << 30
        for _ in range(3):
            manager.restart(signal.SIGKILL)
            assert manager.process is not None
            pid = manager.process.pid
            times[which].append(min(manager.ready_at - manager.started_at, cpu_seconds(pid)))
            assert all(info.origin == "restart" for info in manager.models().values())
            assert bytes_read(pid) < 64 << 20, "modules, configuration, /proc: no weights"
    with Client(manager.runtime_dir) as client, client.open("large") as model:
        one = np.ones((1, 1024), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
        assert not model.moe(5, *one).any(), "experts of zeros"
    assert min(times["large"]) < 1.5, times
    assert min(times["large"]) - min(times["small"]) < 0.3, times
