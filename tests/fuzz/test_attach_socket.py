"""The attach socket of a real daemon against random and mutated messages, foreign descriptors and floods."""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_daemon import EXAMPLES, Counter, RealDaemon, under_attack

from syshax import Client
from syshax.errors import error_from_code
from syshax.protocol import ATTACH_MESSAGE_BYTES, StatusAnswer

REQUEST: dict[str, Any] = {"model": "tiny", "client": "hostile", "max_tokens": 4, "num_slots": 1}
ATTACH_SECONDS = 3.0
"""The most that an honest client waits for a session while others flood the socket."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RealDaemon]:
    with under_attack() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def counter() -> Iterator[Counter]:
    counter = Counter("attach socket")
    yield counter
    counter.write()


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=20)
    | st.sampled_from([0, -1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 1e308, "", "tiny", "../tiny", "tiny\0", "float16"])
    | st.lists(st.integers(), max_size=4)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)
FIELDS = st.sampled_from([*REQUEST, "protocol", "top_k", "dtype", "priority", "fingerprint", "cpus", "nonsense"])
MUTATED = st.dictionaries(FIELDS, VALUES, max_size=3).map(lambda changes: json.dumps({**REQUEST, **changes}).encode())
CUT = st.integers(0, 60).map(lambda size: json.dumps(REQUEST).encode()[:size])
FLIPPED = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 255)), min_size=1, max_size=4).map(
    lambda flips: bytes(
        dict(flips).get(index, byte) for index, byte in enumerate(json.dumps(REQUEST).encode())
    )
)  # fmt: skip
LONG = st.integers(ATTACH_MESSAGE_BYTES - 2, ATTACH_MESSAGE_BYTES + 40_000).map(
    lambda size: json.dumps(REQUEST).encode().ljust(size)
)
DEEP = st.integers(1, 16_000).map(lambda depth: b"[" * depth) | st.integers(1, 3000).map(lambda n: b'{"a":' * n)
MESSAGES = (
    MUTATED | MUTATED | FLIPPED | CUT | st.binary(max_size=200) | LONG | DEEP | st.just(json.dumps(REQUEST).encode())
)
FOREIGN = st.lists(st.sampled_from(["pipe", "memory", "socket", "directory", "null", "eventfd"]), max_size=6)
ENDINGS = st.sampled_from(["read", "leave", "again", "half"])


def foreign_descriptor(kind: str) -> list[int]:
    if kind == "pipe":
        return list(os.pipe())
    if kind == "socket":
        return [half.detach() for half in socket.socketpair()]
    return [
        {
            "memory": lambda: os.memfd_create("foreign"),
            "directory": lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
            "null": lambda: os.open("/dev/null", os.O_RDWR),
            "eventfd": lambda: os.eventfd(0),
        }[kind]()
    ]


def exchange(daemon: RealDaemon, message: bytes, foreign: list[str], ending: str) -> None:
    descriptors = [number for kind in foreign for number in foreign_descriptor(kind)]
    try:
        with daemon.dial() as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(connection, [message], descriptors)
                if ending == "again":
                    socket.send_fds(connection, [message], descriptors)
                if ending == "half":
                    connection.shutdown(socket.SHUT_WR)
            if ending != "leave":
                check_answer(connection)
    finally:
        for number in descriptors:
            os.close(number)


def check_answer(connection: socket.socket) -> None:
    """A session with its two descriptors, an error of ours, or, where the connection was ended first, nothing."""
    try:
        data, received, _, _ = socket.recv_fds(connection, 1 << 16, 8)
    except ConnectionResetError:
        return
    for number in received:
        os.close(number)
    if not data:
        return
    answer = json.loads(data)
    if "error" in answer:
        assert not received and type(error_from_code(answer["error"]["code"], "", "")).__name__ != "SyshaxError"
        assert answer["error"]["code"] != "internal", answer
    else:
        assert len(received) == 2 and answer["session_id"] > 1


@settings(max_examples=EXAMPLES * 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(MESSAGES, FOREIGN, ENDINGS)
def test_any_message(daemon: RealDaemon, counter: Counter, message: bytes, foreign: list[str], ending: str) -> None:
    exchange(daemon, message, foreign, ending)
    counter.add()
    assert daemon.process.poll() is None


def test_foreign_descriptors_are_closed(daemon: RealDaemon) -> None:
    """Of a message that is refused, of one that attaches and of one that comes too late."""
    with tempfile.TemporaryDirectory() as folder:
        watched = Path(folder) / "watched"
        with watched.open("w") as file:
            for message in (b"nonsense", json.dumps(REQUEST).encode()):
                with daemon.dial() as connection:
                    socket.send_fds(connection, [message], [file.fileno()] * 200)
                    check_answer(connection)
                    with suppress(OSError):
                        socket.send_fds(connection, [message], [file.fileno()] * 200)
                    assert watched not in open_files(daemon)


def open_files(daemon: RealDaemon) -> list[Path]:
    found = []
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(entry.readlink())
    return found


def honest_attach_seconds(daemon: RealDaemon) -> float:
    begin = time.monotonic()
    with Client(daemon.runtime_dir) as client:
        client.open("tiny")
    return time.monotonic() - begin


def test_silent_connections_keep_nobody_out(daemon: RealDaemon, counter: Counter) -> None:
    """Many more than may wait, and new ones as fast as the daemon gives up on old ones."""
    silent = [daemon.dial() for _ in range(150)]
    counter.add(len(silent))
    assert honest_attach_seconds(daemon) < ATTACH_SECONDS
    silent[0].settimeout(ATTACH_SECONDS)
    assert b"have not said what they want" in silent[0].recv(1000), "the oldest is told why it is ended"
    for connection in silent:
        connection.close()


def test_a_flood_of_connections(daemon: RealDaemon, counter: Counter) -> None:
    dice = random.Random(3)
    for _ in range(EXAMPLES * 20):
        connection = daemon.dial()
        if dice.random() < 0.3:
            connection.setblocking(False)
            with suppress(OSError):
                connection.send(json.dumps(REQUEST).encode() if dice.random() < 0.3 else b"{")
        connection.close()
        counter.add()
    assert honest_attach_seconds(daemon) < ATTACH_SECONDS


def test_sessions_up_to_the_limit_and_no_further(daemon: RealDaemon) -> None:
    held = []
    for _ in range(100):
        connection = daemon.dial()
        connection.send(json.dumps(REQUEST).encode())
        data, received, _, _ = socket.recv_fds(connection, 1 << 16, 8)
        for number in received:
            os.close(number)
        held.append(connection)
        if b"limits.sessions" in data:
            break
    assert len(held) == 64, "the honest session, 63 others, and the one that is refused"
    for connection in held:
        connection.close()
    daemon.until(lambda: daemon.control.get("/v1/status", StatusAnswer).sessions == 1, "the sessions' end")
    assert honest_attach_seconds(daemon) < ATTACH_SECONDS


def test_afterwards_all_is_as_before(daemon: RealDaemon) -> None:
    daemon.check()
    daemon.check_rest()
