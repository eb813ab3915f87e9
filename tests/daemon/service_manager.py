"""A service manager for one daemon: what systemd does for restarts without reloading, in plain Python.

Owns $NOTIFY_SOCKET and the store of descriptors (FDSTORE, FDSTOREREMOVE, BARRIER, READY), both listening sockets, and
starts the daemon with what is in the store. It can kill the daemon at a chosen message, which no real one does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from syshax.control import Control
from syshax.protocol import LoadRequest, ModelInfo, ModelsAnswer

# Moves descriptors to 3 and up and becomes the daemon: bash keeps those from 10 on to itself.
_HAND_OVER = """
import os, sys
for place, descriptor in enumerate(map(int, sys.argv[1].split(","))):
    os.dup2(descriptor, 3 + place)
    os.close(descriptor)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execvp(sys.argv[2], sys.argv[2:])
"""
KINDS = {"control": socket.SOCK_STREAM, "attach": socket.SOCK_SEQPACKET}


def private_shm(size: int) -> list[str]:
    """Words before a command that give it a /dev/shm of its own of that many bytes."""
    for flags in ("-m", "-rm"):
        words = ["unshare", flags, "--propagation", "private"]
        if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
            return [*words, "sh", "-c", f'mount -t tmpfs -o size={size},mode=1777 own /dev/shm && exec "$0" "$@"']
    sys.exit("a mount namespace is needed for a /dev/shm of one's own: allow user namespaces, or run this as root")


class FdStore:
    """$NOTIFY_SOCKET at `directory`/notify and what was put into the store by it, read by a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.address = directory / "notify"
        self.store: list[tuple[str, int]] = []
        self.messages: list[dict[str, str]] = []
        self.ready = threading.Event()
        self.ready_at = 0.0
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self.address))
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._notify, 4096, 8)
            if not data:  # shut down
                return
            message = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.receive(message, list(descriptors))

    def receive(self, message: dict[str, str], descriptors: list[int]) -> None:
        self.messages.append(message)
        if "FDSTORE" in message:
            self.store += [(message["FDNAME"], descriptor) for descriptor in descriptors]
        else:
            for descriptor in descriptors:
                os.close(descriptor)
        if "FDSTOREREMOVE" in message:
            self.remove(message["FDNAME"])
        if "READY" in message:
            self.ready_at = time.monotonic()
            self.ready.set()

    def remove(self, name: str) -> None:
        for descriptor in [descriptor for held, descriptor in self.store if held == name]:
            os.close(descriptor)
        self.store = [(held, descriptor) for held, descriptor in self.store if held != name]

    def put(self, name: str, descriptor: int) -> None:
        """Takes the descriptor over."""
        self.store.append((name, descriptor))

    def names(self) -> list[str]:
        return sorted(name for name, _ in self.store)

    def of_kind(self, kind: str) -> list[tuple[str, int]]:
        """kind: "arena" or "manifest"."""
        return [(name, descriptor) for name, descriptor in self.store if name.startswith(f"syshax-{kind}.")]

    def handed(self) -> list[tuple[str, int]]:
        """Duplicates of all descriptors, as a new process would get them."""
        return [(name, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)) for name, descriptor in self.store]

    def close(self) -> None:
        self._notify.shutdown(socket.SHUT_RD)
        self._reader.join()
        for name in {name for name, _ in self.store}:
            self.remove(name)
        self._notify.close()


class ServiceManager(FdStore):
    """`directory`: short, for sockets. The daemon's runtime directory is `directory`/run. `wrapper`: words before
    the daemon's command; `environment`: variables of its own."""

    def __init__(
        self,
        directory: Path,
        config: str = "",
        wrapper: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(directory)
        self.wrapper, self.environment = wrapper, environment or {}
        self.directory, self.runtime_dir = directory, directory / "run"
        self.config_file, self.log_file = directory / "syshaxd.toml", directory / "log"
        self.runtime_dir.mkdir(mode=0o700)
        self.configure(config)
        self.kill_when: Callable[[dict[str, str]], bool] = lambda message: False
        """Kills the daemon when such a message comes; that and later ones are lost, as a dead process's may be."""
        self._deaf = False
        self.process: subprocess.Popen[bytes] | None = None
        self.control = Control(self.runtime_dir, timeout=20)
        self.started_at = 0.0
        self._listeners = {name: self._listener(name, kind) for name, kind in KINDS.items()}

    def _listener(self, name: str, kind: socket.SocketKind) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(str(self.runtime_dir / f"{name}.sock"))
        listener.listen(64)
        return listener

    def configure(self, text: str) -> None:
        self.config_file.write_text(text)

    def receive(self, message: dict[str, str], descriptors: list[int]) -> None:
        if self.process is not None and self.kill_when(message):
            self.kill_when, self._deaf = (lambda message: False), True
            self.process.kill()
        if self._deaf:
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            super().receive(message, descriptors)

    # ------------------------------------------------------------------- processes

    def start(self, wait: bool = True) -> None:
        """As systemd does: LISTEN_FDS with the sockets first, then the store."""
        assert self.process is None or self.process.poll() is not None
        handed = [(name, listener.fileno()) for name, listener in self._listeners.items()] + self.store
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 300) for _, descriptor in handed]
        environment = os.environ | {
            "NOTIFY_SOCKET": str(self.address), "INVOCATION_ID": "0" * 32, "LISTEN_FDS": str(len(handed)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in handed),
        } | self.environment  # fmt: skip
        daemon = [
            *self.wrapper, sys.executable, "-m", "syshaxd", "--user", "--runtime-dir", self.runtime_dir,
            "--state-dir", self.directory / "state", "--config", self.config_file,
        ]  # fmt: skip
        command = [sys.executable, "-S", "-c", _HAND_OVER, ",".join(map(str, high)), *map(str, daemon)]
        self._deaf = False
        self.ready.clear()
        with self.log_file.open("ab") as log:
            self.started_at = time.monotonic()
            self.process = subprocess.Popen(command, stderr=log, pass_fds=high, start_new_session=True, env=environment)
        for descriptor in high:
            os.close(descriptor)
        if wait:
            self.wait_ready()

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.ready.wait(0.05):
            assert self.process is not None and self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(60)

    def restart(self, how: signal.Signals = signal.SIGTERM, wait: bool = True) -> int:
        code = self.end(how)
        self.start(wait)
        return code

    def log(self) -> str:
        return self.log_file.read_text()

    # ----------------------------------------------------------------------- asking

    def load(self, name: str, path: Path, format: str) -> ModelInfo:
        self.load_begin(name, path, format)
        return self.until_ready(name)

    def load_begin(self, name: str, path: Path, format: str) -> None:
        self.control.post("/v1/models", LoadRequest(name=name, path=str(path), format=format), ModelInfo)

    def model(self, name: str) -> ModelInfo:
        return self.control.get(f"/v1/models/{name}", ModelInfo)

    def models(self) -> dict[str, ModelInfo]:
        return {info.name: info for info in self.control.get("/v1/models", ModelsAnswer).models}

    def until_ready(self, name: str) -> ModelInfo:
        deadline = time.monotonic() + 60
        while (info := self.model(name)).state in ("loading", "configured"):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)
        assert info.state == "ready", info.reason
        return info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for listener in self._listeners.values():
            listener.close()
        self.close()
