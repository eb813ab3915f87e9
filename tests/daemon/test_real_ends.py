"""Sessions that the running daemon ends, with the compiled core: who hears what, and who comes back."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from service_manager import ServiceManager

from syshax import Client, Model
from syshax.errors import SessionEndedError, UnknownSessionError
from syshax.protocol import Closing, SessionChange, SessionInfo, SessionsAnswer

REQUEST = np.ones((2, 64), np.float32), np.zeros((2, 2), np.int32), np.ones((2, 2), np.float32)
CLOSING, SUBMIT_TAIL = 276, 128
CLIENT = """
import sys
import numpy as np
from syshax import Client, SyshaxError
model = Client(sys.argv[1]).open("m", max_tokens=4096)
arrays = np.ones((4096, 64), np.float32), np.zeros((4096, 2), np.int32), np.ones((4096, 2), np.float32)
first = model.moe(0, *arrays)
print(model.session_id, flush=True)
session = model.session_id
try:
    while model.session_id == session or "stay" in sys.argv:
        assert (model.moe(0, *arrays, timeout=60, reconnect_s=60) == first).all()
    print("attached again", model.session_id)
except SyshaxError as error:
    print(error.code, error.message)
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceManager]:
    """One daemon for all: whatever a test does to its own sessions must not matter to the next."""
    path = tmp_path_factory.mktemp("m")
    write_checkpoint(path)
    config = "[cache]\nenabled = false\n[limits]\nstopped_seconds = 1\n"  # no cache: its writer holds descriptors
    config += f'[models.m]\npath = "{path}"\nautoload = true\n'
    with tempfile.TemporaryDirectory(prefix="sx") as folder, ServiceManager(Path(folder), config) as made:
        made.start()
        made.until_ready("m")
        yield made


@pytest.fixture
def bystander(manager: ServiceManager) -> Iterator[Model]:
    """Attached all the time; still right at the end."""
    with Client(manager.runtime_dir) as client:
        model = client.open("m")
        expected, number = model.moe(0, *REQUEST), model.session_id
        yield model
        np.testing.assert_array_equal(model.moe(0, *REQUEST), expected)
        assert model.session_id == number
    until(manager, [])


def sessions(manager: ServiceManager) -> list[int]:
    return [info.session_id for info in manager.control.get("/v1/sessions", SessionsAnswer).sessions]


def until(manager: ServiceManager, wanted: list[int], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while sessions(manager) != wanted:
        assert time.monotonic() < deadline, sessions(manager)
        time.sleep(0.02)


def start_client(manager: ServiceManager, *words: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", CLIENT, str(manager.runtime_dir), *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def test_who_was_kicked_hears_by_whom_and_does_not_come_back(manager: ServiceManager, bystander: Model) -> None:
    child, number = start_client(manager, "stay")
    with child:
        time.sleep(0.1)
        manager.control.delete(f"/v1/sessions/{number}")
        out, _ = child.communicate(timeout=20)
    assert (
        out.startswith("session_ended ")
        and f"ended over the control API by uid {os.getuid()}, pid {os.getpid()}" in out
    )
    assert sessions(manager) == [bystander.session_id]
    with pytest.raises(UnknownSessionError):
        manager.control.delete(f"/v1/sessions/{number}")


def test_who_was_stopped_for_too_long_goes_on_where_it_was(manager: ServiceManager, bystander: Model) -> None:
    child, number = start_client(manager)
    with child:
        child.send_signal(signal.SIGSTOP)
        until(manager, [bystander.session_id])
        bystander.moe(0, *REQUEST, timeout=5)
        child.send_signal(signal.SIGCONT)
        out, _ = child.communicate(timeout=30)
    assert out == f"attached again {number + 1}\n"
    until(manager, [bystander.session_id])


def test_who_breaks_its_queue_hears_which_rule(manager: ServiceManager, bystander: Model) -> None:
    with Client(manager.runtime_dir) as client:
        model = client.open("m")
        model.moe(0, *REQUEST)
        address, _ = model.memory()
        ctypes.c_uint32.from_address(address + SUBMIT_TAIL).value += 100
        session = model._session
        assert session is not None
        os.eventfd_write(session.ring._descriptors[0], 1)
        closing = ctypes.c_uint32.from_address(address + CLOSING)
        deadline = time.monotonic() + 5
        while closing.value == Closing.OPEN and time.monotonic() < deadline:
            time.sleep(0.001)
        assert closing.value == Closing.BROKEN_QUEUE
        with pytest.raises(SessionEndedError):
            model.moe(0, *REQUEST, timeout=20, reconnect_s=20)
        until(manager, [bystander.session_id])
        with pytest.raises(SessionEndedError, match="submit_tail is further ahead than there are slots"):
            model.moe(0, *REQUEST, reconnect_s=20)


def test_who_truncates_its_memory_hears_it_on_the_connection(manager: ServiceManager, bystander: Model) -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connection:
        connection.settimeout(20)
        connection.connect(str(manager.runtime_dir / "attach.sock"))
        connection.send(json.dumps({"model": "m", "max_tokens": 16}).encode())
        _, (memory, doorbell), _, _ = socket.recv_fds(connection, 65536, 2)
        os.ftruncate(memory, 0)
        os.eventfd_write(doorbell, 1)
        last = json.loads(connection.recv(65536))["error"]
        assert last["code"] == "session_ended" and "truncated its shared memory" in last["message"]
        assert connection.recv(10) == b""
        os.close(memory)
        os.close(doorbell)
    until(manager, [bystander.session_id])


def test_class_and_share_of_a_running_session(manager: ServiceManager, bystander: Model) -> None:
    change = SessionChange(priority="batch", share=40)
    info = manager.control.patch(f"/v1/sessions/{bystander.session_id}", change, SessionInfo)
    assert (info.priority, info.share) == ("batch", 40)
    bystander.moe(0, *REQUEST)
    (info,) = manager.control.get("/v1/sessions", SessionsAnswer).sessions
    assert (info.priority, info.share, info.requests) == ("batch", 40, 2)
    assert 0 < info.service_ms_p50 <= info.service_ms_p99
    assert 0 <= info.wait_ms_p50 <= info.wait_ms_p99 and 0 < info.use <= 1


def test_a_share_holds_at_once_and_its_use_is_seen(manager: ServiceManager, bystander: Model) -> None:
    """A session that asks without pause takes nearly all of the time; then a fifth of it, and others do not notice."""
    child, number = start_client(manager, "stay")
    with child:
        time.sleep(2)

        def busy() -> SessionInfo:
            return next(
                info
                for info in manager.control.get("/v1/sessions", SessionsAnswer).sessions
                if info.session_id == number
            )

        free = busy()
        assert free.throttled_ms_total == 0
        manager.control.patch(f"/v1/sessions/{number}", SessionChange(share=20), SessionInfo)
        before, began = busy(), time.monotonic()
        time.sleep(3)
        after, took = busy(), time.monotonic() - began
        child.kill()
    assert after.requests > before.requests, "it is slowed down, not stopped"
    assert after.throttled_ms_total > 500
    assert (after.compute_ms_total - before.compute_ms_total) / 1e3 / took < 0.3
    assert free.use > 0.3
