"""Attaching, and every way in which it fails: each with its own error, and with nothing left open."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ring_harness import FakeDaemon, descriptors, eventually

from syshax import (
    Client,
    DaemonAbsentError,
    DaemonLostError,
    FingerprintError,
    InvalidArgumentError,
    LimitError,
    RequestTimeoutError,
    UnknownModelError,
    VersionError,
)
from syshax import client as client_module
from syshax.errors import InternalError
from syshax.protocol import ATTACH_MESSAGE_BYTES, AttachAnswer, Geometry


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = set(descriptors())
    yield
    eventually(lambda: set(descriptors()) <= before)


def test_what_a_model_knows(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", max_tokens=7, num_slots=3, top_k=1)
    assert isinstance(model.geometry, Geometry) and model.geometry.hidden_size == 64
    assert (model.name, model.format, model.boot_id) == ("tiny", "q8_0", daemon.boot_id)
    assert (model.fingerprint, model.max_tokens, model.top_k) == (daemon.fingerprint, 7, 1)
    address, size = model.memory()
    assert address % 4096 == 0 and size == daemon.harness.layout(7, 1, 4, 3)["total_bytes"]
    slot = model.acquire()
    assert all(a % 4096 == 0 for a in (slot.hidden_states, slot.topk_ids, slot.topk_weights, slot.output))
    slot.release()
    client.close()
    assert model.closed


def test_the_runtime_directory_may_come_from_the_environment(
    daemon: FakeDaemon, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSHAX_RUNTIME_DIR", str(runtime_dir))
    with Client() as client:
        assert client.open("tiny").session_id == 1
    monkeypatch.delenv("SYSHAX_RUNTIME_DIR")
    assert str(Client().runtime_dir) == "/run/syshax"


def test_no_daemon(client: Client, runtime_dir: Path) -> None:
    with pytest.raises(DaemonAbsentError) as error:
        client.open("tiny")
    assert str(runtime_dir / "attach.sock") in str(error.value) and "systemctl start syshaxd" in str(error.value)


def test_a_stale_socket(client: Client, runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(runtime_dir / "attach.sock"))
    with pytest.raises(DaemonAbsentError, match="the socket is there, its daemon is not"):
        client.open("tiny")


def test_a_socket_of_another_kind(client: Client, runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(runtime_dir / "attach.sock"))
        stream.listen()
        with pytest.raises(InternalError, match="not the kind of socket"):
            client.open("tiny")


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(InvalidArgumentError, match="use a shorter runtime directory"):
        Client("/tmp/" + "x" * 120).open("tiny")


REFUSED = """
import os, sys
from syshax import Client, NotAllowedError
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    Client(sys.argv[1]).open("tiny")
except NotAllowedError as error:
    print(error)
"""


@pytest.mark.parametrize("locked", ["socket", "directory"])
def test_another_user_is_refused_in_words(daemon: FakeDaemon, runtime_dir: Path, locked: str) -> None:
    """Run by root, the client becomes nobody; run by a user, the mode locks the user itself out."""
    runtime_dir.chmod(0o711 if locked == "socket" else 0o000)
    (runtime_dir / "attach.sock").chmod(0o000) if locked == "socket" or os.geteuid() == 0 else None
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(runtime_dir)], capture_output=True, text=True, timeout=30, check=False
    )
    runtime_dir.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert "usermod -aG syshax" in done.stdout
    assert ("mode 0000" if locked == "socket" else "cannot be searched") in done.stdout


def test_an_unknown_model(daemon: FakeDaemon, client: Client) -> None:
    with pytest.raises(UnknownModelError, match="this daemon has: tiny"):
        client.open("huge")


def test_another_checkpoint(daemon: FakeDaemon, client: Client) -> None:
    with pytest.raises(FingerprintError):
        client.open("tiny", fingerprint="0" * 64)
    assert client.open("tiny", fingerprint="f" * 64).name == "tiny"
    client.close()


def test_the_daemons_own_errors_arrive_as_they_are(daemon: FakeDaemon, client: Client) -> None:
    daemon.refuse_with = LimitError("64 sessions are attached, the limit is 64", "raise limits.sessions")
    with pytest.raises(LimitError) as error:
        client.open("tiny")
    assert (error.value.message, error.value.hint) == (daemon.refuse_with.message, daemon.refuse_with.hint)


def test_waiting_for_a_daemon_to_come_up(runtime_dir: Path, client: Client) -> None:
    started: list[FakeDaemon] = []
    timer = threading.Timer(0.2, lambda: started.append(FakeDaemon(runtime_dir)))
    timer.start()
    model = client.open("tiny", wait=5)
    timer.join()
    model.close()
    started[0].close()
    start = time.monotonic()
    with pytest.raises(DaemonAbsentError):
        client.open("tiny", wait=0.3)
    assert 0.1 < time.monotonic() - start < 1.5


def _set(path: str, value: Any) -> Callable[[AttachAnswer], None]:
    def change(answer: AttachAnswer) -> None:
        *parents, last = path.split(".")
        target: Any = answer
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)

    return change


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("protocol", 2, "protocol 2, this client 1"),
        ("layout.max_tokens", 17, "max_tokens 17, the ring's header 16"),
        ("layout.version_major", 2, "version_major 2"),
        ("geometry", None, "geometry"),
    ],
)
def test_versions_that_differ(daemon: FakeDaemon, client: Client, path: str, value: Any, words: str) -> None:
    daemon.change_answer = _set(path, value)
    with pytest.raises(VersionError) as error:
        client.open("tiny", max_tokens=16)
    assert words in str(error.value)
    daemon.change_answer = None
    eventually(lambda: daemon.sessions() == 0)


@contextmanager
def listener(runtime_dir: Path, serve: Callable[[socket.socket], None] | None) -> Iterator[None]:
    """A daemon that answers its one client in its own way, or not at all."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(runtime_dir / "attach.sock"))
        listening.listen()

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                if serve is not None:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join()


def _send(data: bytes, *passed: int) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        socket.send_fds(connection, [data], list(passed))

    return serve


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"[]", VersionError),
        (b"\xff not json", VersionError),
        (b"{}", VersionError),
        (b'{"error": {"code": "no_such_code", "message": "from the future"}}', InternalError),
        (b"x" * (ATTACH_MESSAGE_BYTES + 1), VersionError),
    ],
)
@pytest.mark.parametrize("passed", [0, 1, 2, 8, 20])
def test_nonsense_answers_leave_nothing_open(
    runtime_dir: Path, client: Client, data: bytes, error: type[Exception], passed: int
) -> None:
    with (
        (runtime_dir / "some file").open("w") as file,
        listener(runtime_dir, _send(data, *[file.fileno()] * passed)),
        pytest.raises((error, VersionError)),
    ):
        client.open("tiny")


def test_a_daemon_that_hangs_up(runtime_dir: Path, client: Client) -> None:
    with listener(runtime_dir, None), pytest.raises(DaemonLostError):
        client.open("tiny")


def test_a_daemon_that_never_answers(runtime_dir: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ATTACH_TIMEOUT", 0.2)
    with (
        listener(runtime_dir, lambda connection: time.sleep(0.5)),
        pytest.raises(RequestTimeoutError, match=r"did not answer the attach within 0.2 s"),
    ):
        client.open("tiny")


def test_a_full_backlog(runtime_dir: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ATTACH_TIMEOUT", 0.2)
    path = str(runtime_dir / "attach.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(path)
            with pytest.raises(RequestTimeoutError, match="accepted no connection"):
                client.open("tiny")


def test_the_library_is_looked_up_beside_the_package_or_where_the_variable_says(daemon: FakeDaemon) -> None:
    text = "import sys; from syshax import Client; Client(sys.argv[1]).open('tiny')"
    for library, word in (("/nowhere/lib.so", "SYSHAX_CLIENT_LIBRARY"), ("libc.so.6", "syshax_client_abi")):
        environment = {**os.environ, "SYSHAX_CLIENT_LIBRARY": library}
        done = subprocess.run(
            [sys.executable, "-c", text, str(daemon.runtime_dir)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1 and word in done.stderr
    assert daemon.sessions() == 0  # nothing was asked of the daemon


def test_open_waits_for_a_daemon_that_is_killed_while_it_answers(runtime_dir: Path, client: Client) -> None:
    """Three that read the request and die; the fourth serves."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(runtime_dir / "attach.sock"))
    listener.listen()
    served: list[FakeDaemon] = []

    def die_then_serve() -> None:
        for _ in range(3):
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.close()
        listener.close()
        served.append(FakeDaemon(runtime_dir))

    dying = threading.Thread(target=die_then_serve)
    dying.start()
    with client.open("tiny", wait=20):
        dying.join()
    served.pop().close()
    gc.collect()  # errors' tracebacks are cycles
