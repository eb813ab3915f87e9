"""A real daemon under attack: `syshaxd --user` with a small model, an honest session that works all along, and what the
process must return to when the attack is over.

Shared by the properties over the attach socket and the control API. How many examples a property takes is
$SYSHAX_FUZZ_EXAMPLES; what was done goes to the file $SYSHAX_FUZZ_COUNTS, for tests/fuzz/run.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_checkpoint

from syshax import Client
from syshax.control import Control
from syshax.errors import DaemonAbsentError, SyshaxError
from syshax.protocol import ATTACH_SOCKET, CONTROL_SOCKET, LoadRequest, ModelInfo, StatusAnswer

EXAMPLES = int(os.environ.get("SYSHAX_FUZZ_EXAMPLES", "60"))
MOST_SECONDS, MEDIAN_SECONDS = 20.0, 0.25
"""What an honest request of a fraction of a millisecond may take, on a machine that does other things too."""
GROWTH_BYTES = 64 << 20
"""Anonymous memory that the interpreter may keep for itself."""


class Honest(threading.Thread):
    """One session that asks all the time, a hundred times a second, and compares."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(name="honest", daemon=True)
        self._client = Client(runtime_dir)
        self._model = self._client.open("tiny")
        random = np.random.default_rng(1)
        self._x = random.standard_normal((4, 64)).astype(np.float32)
        self._ids = np.array([[0, 1], [2, 3], [3, -1], [1, 0]], np.int32)
        self._weights = random.random((4, 2)).astype(np.float32)
        self._expected = [self._model.moe(layer, self._x, self._ids, self._weights).copy() for layer in range(2)]
        self._over = threading.Event()
        self.seconds: list[float] = []
        self.fault: str = ""

    def run(self) -> None:
        while not self.fault and not self._over.wait(0.01):
            try:
                self._ask(len(self.seconds) % 2)
            except SyshaxError as error:
                self.fault = repr(error)

    def _ask(self, layer: int) -> None:
        begin = time.monotonic()
        got = self._model.moe(layer, self._x, self._ids, self._weights)
        self.seconds.append(time.monotonic() - begin)
        if not np.array_equal(got, self._expected[layer]):
            self.fault = "a wrong answer"

    def check(self) -> None:
        assert not self.fault, self.fault
        assert self.is_alive() and self.seconds
        assert max(self.seconds) < MOST_SECONDS and statistics.median(self.seconds) < MEDIAN_SECONDS, (
            f"slowest {max(self.seconds)}, median {statistics.median(self.seconds)}"
        )

    def end(self) -> None:
        self._over.set()
        self.join(10)
        self._client.close()


class RealDaemon:
    """The process, its honest client, and its state at rest."""

    def __init__(self, folder: Path, *arguments: str | Path) -> None:
        """arguments: in place of `--user`."""
        self.runtime_dir = folder / "run"
        self._log = folder / "log"
        command = [sys.executable, "-m", "syshaxd", "--runtime-dir", self.runtime_dir,
                   "--state-dir", folder / "state", *(arguments or ["--user"])]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], stderr=log, start_new_session=True)
        self.control = Control(self.runtime_dir)
        self._wait_ready()
        write_checkpoint(folder / "tiny")
        self.control.post("/v1/models", LoadRequest(name="tiny", path=str(folder / "tiny"), format="fp16"), ModelInfo)
        self.until(lambda: self.control.get("/v1/models/tiny", ModelInfo).state == "ready", "loading")
        self.honest = Honest(self.runtime_dir)
        self.honest.start()
        self._warm_up()
        self._rest = self.descriptors(), self.threads(), self.memory_bytes()

    def _wait_ready(self) -> None:
        for _ in range(600):
            with contextlib.suppress(DaemonAbsentError):
                self.control.get("/v1/status", StatusAnswer)
                return
            assert self.process.poll() is None, self._log.read_text()
            time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    def _warm_up(self) -> None:
        """What the first use of each part makes once: the event loop's threads, imports of routes."""
        clients = [Client(self.runtime_dir) for _ in range(8)]
        opening = [threading.Thread(target=client.open, args=("tiny",)) for client in clients]
        for thread in opening:
            thread.start()
        for thread in opening:
            thread.join()
        for client in clients:
            client.close()
        for path in ("/metrics", "/v1/doctor", "/v1/status"):
            self.control.text(path)
        self.until(lambda: self.control.get("/v1/status", StatusAnswer).sessions == 1, "the sessions' end")
        time.sleep(0.2)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def memory_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in text.splitlines())
        return 1024 * int(fields["RssAnon"].split()[0])

    def dial(self, name: str = ATTACH_SOCKET, seconds: float = 10.0) -> socket.socket:
        kind = socket.SOCK_SEQPACKET if name == ATTACH_SOCKET else socket.SOCK_STREAM
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.settimeout(seconds)
        end = time.monotonic() + seconds
        while True:
            try:
                connection.connect(str(self.runtime_dir / name))
                return connection
            except BlockingIOError:  # the kernel's queue is full
                assert time.monotonic() < end, "no connection is accepted"
                time.sleep(0.002)

    def dial_control(self) -> socket.socket:
        return self.dial(CONTROL_SOCKET)

    def check(self) -> None:
        """It lives, the honest session got what it asked for, and no client's fault left a traceback."""
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}: {self.log()[-4000:]}"
        self.honest.check()
        log = self.log()
        assert "Traceback" not in log, log[max(0, log.index("Traceback") - 500) :][:4000]

    def check_rest(self) -> None:
        """What the attack took is given back within 5 s."""
        descriptors, threads, memory = self._rest
        self.until(lambda: self.control.get("/v1/status", StatusAnswer).sessions == 1, "the sessions' end", 15)
        self.until(lambda: self.descriptors() <= descriptors, f"closing down to {descriptors} descriptors", 5)
        pool = min(32, (os.cpu_count() or 1) + 4)  # the event loop's own, made as they are needed and kept
        self.until(lambda: self.threads() <= threads + pool, f"going back to {threads} threads", 5)
        grown = self.memory_bytes() - memory
        assert grown < GROWTH_BYTES, f"{grown} bytes more of anonymous memory than before"

    def end(self) -> None:
        self.honest.end()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0


@contextlib.contextmanager
def under_attack(*arguments: str | Path) -> Iterator[RealDaemon]:
    with tempfile.TemporaryDirectory(prefix="sxf") as folder:
        Path(folder).chmod(0o755)
        daemon = RealDaemon(Path(folder), *arguments)
        try:
            yield daemon
            daemon.check()
        finally:
            if daemon.process.poll() is None:
                daemon.end()


class Counter:
    """Counts the inputs of one property and hands the count on."""

    def __init__(self, what: str) -> None:
        self._what, self._inputs, self._begin = what, 0, time.monotonic()

    def add(self, inputs: int = 1) -> None:
        self._inputs += inputs

    def write(self) -> None:
        if path := os.environ.get("SYSHAX_FUZZ_COUNTS"):
            row = {"what": self._what, "inputs": self._inputs, "seconds": time.monotonic() - self._begin}
            with Path(path).open("a") as file:
                file.write(json.dumps(row) + "\n")
