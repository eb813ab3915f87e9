"""The control API of a real daemon against random and mutated HTTP, half-open and slow connections, and floods.

The attacker here is the daemon's own user, an administrator, so that all code is reached; what an administrator may
rightly do (end the honest session, unload its model) is left out.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from real_daemon import EXAMPLES, Counter, RealDaemon, under_attack

from syshax.errors import LimitError
from syshax.protocol import StatusAnswer
from syshax.routes import ROUTES

CALL_SECONDS = 3.0
"""The most that an honest call takes while others flood the socket."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RealDaemon]:
    with under_attack() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def counter() -> Iterator[Counter]:
    counter = Counter("control API")
    yield counter
    counter.write()


TOKENS = st.sampled_from(["GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS", "get", "CONNECT", "TRACE", "PRI"])
METHODS = TOKENS | TOKENS | TOKENS | st.text(max_size=8)
KNOWN = [route.split()[1] for route in ROUTES]
NAMES = st.sampled_from(
    ["x", "..", "%00", "%ff", "%2e%2e", "a" * 300, "-1", "99999999999999999999", "0", "é", "\udc80"]
)
PATHS = (
    st.builds(
        lambda path, name: path.replace("{name}", name).replace("{session_id}", name), st.sampled_from(KNOWN), NAMES
    )
    | st.builds(
        lambda path, tail: path + tail, st.sampled_from(KNOWN), st.sampled_from(["/", "//", "?force=2", "?\0", "#"])
    )
    | st.text(max_size=30).map(lambda text: "/" + text)
    | st.sampled_from(["*", "http://x/v1/status", "//v1/status", "/" + "a" * 9000, "", "/v1/%", "/v1/../v1/status"])
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["name", "path", "format", "values", "keys", "all", "nonsense"])
BODIES = (
    st.just(b"")
    | st.dictionaries(FIELDS, VALUES, max_size=3).map(lambda fields: json.dumps(fields).encode())
    | VALUES.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=100)
    | st.integers(1, 5000).map(lambda depth: b"[" * depth)
    | st.sampled_from(
        [b'{"name":"\\ud800"}', b'{"values":{"a.b":1e999}}', b'{"name":"a","path":"/\\u0000"}', b"9" * 5000]
    )
)
HEADERS = st.lists(
    st.sampled_from(
        [
            "Content-Length: -1", "Content-Length: 5, 6", "Content-Length: 99999999999999999999", "Content-Length: 3",
            "Content-Length: 1000000000", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked",
            "Expect: 100-continue", "Expect: wonders", "Upgrade: websocket", "Connection: keep-alive, Upgrade",
            "Content-Encoding: gzip", "Content-Encoding: deflate", "Content-Type: \xff", "X: " + "y" * 9000, ":",
            "no colon", " folded", "X\0: 1", "Host: a", "Host: b", "Sec-WebSocket-Key: x", "Accept-Encoding: br",
        ]
    )
    | st.text(max_size=20),
    max_size=3,
)  # fmt: skip
CHUNKS = st.lists(
    st.sampled_from([b"0\r\n\r\n", b"3\r\nabc\r\n", b"ffffffffffffffffff\r\n", b"-1\r\n", b"3;x=y\r\nab", b"zz\r\n"])
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, more or less."""
    method, path, body = draw(METHODS), draw(PATHS), draw(BODIES)
    headers = draw(HEADERS)
    version = draw(st.sampled_from(["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""]))
    length = [] if any("ength" in line or "chunked" in line for line in headers) else [f"Content-Length: {len(body)}"]
    if any("chunked" in line for line in headers):
        body = b"".join(draw(CHUNKS))
    lines = [f"{method} {path} {version}", "Host: x", *length, *headers]
    data = "\r\n".join(lines).encode("utf-8", "surrogateescape" if "\udc80" in path else "surrogatepass")
    return data + b"\r\n\r\n" + body


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """One or more requests in a row, with bytes changed and perhaps an end too early."""
    data = bytearray(b"".join(draw(st.lists(requests(), min_size=1, max_size=3))))
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)):
        if at < len(data):
            data[at] = byte
    return bytes(data[: draw(st.integers(0, len(data)) | st.just(len(data)))])


def statuses(data: bytes) -> list[int]:
    """Of the answers: what an HTTP client would see as their first lines."""
    return [int(line.split(b" ")[1]) for line in data.split(b"\r\n") if line.startswith(b"HTTP/1.") and b" " in line]


def talk(daemon: RealDaemon, data: bytes, seconds: float) -> bytes:
    """Sends all, reads until the end or until nothing more comes, then says that it was all and reads on."""
    answer = b""
    with daemon.dial_control() as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        for wait in (min(seconds, 0.05) if b"\r\n\r\n" in data else 0.001, seconds):
            connection.settimeout(wait)
            with suppress(TimeoutError, ConnectionResetError):
                while more := connection.recv(1 << 16):
                    answer += more
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
    return answer


@settings(max_examples=EXAMPLES * 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests() | mutated() | st.binary(max_size=200))
def test_any_request(daemon: RealDaemon, counter: Counter, data: bytes) -> None:
    assume(b"/v1/models/tiny" not in data and b"DELETE /v1/sessions/1 " not in data)
    for status in statuses(talk(daemon, data, 0.5)):
        assert status < 500 or status in (501, 503, 505), (status, data)
    counter.add()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v1/\udc80 HTTP/1.1\r\nHost: x\r\n", (400, 404)),
        ("GET /v1/models/\udc80 HTTP/1.1\r\nHost: x\r\n", (400, 404)),
        ("\udc80 /v1/status HTTP/1.1\r\nHost: x\r\n", (400, 404)),
        ("GET /v1/models/%ED%A0%80 HTTP/1.1\r\nHost: x\r\n", (400, 404)),
        ("DELETE /v1/models/x?force=%ff HTTP/1.1\r\nHost: x\r\n", (400, 404)),
        ("GET /v1/status HTTP/1.1\r\nHost: x\r\nX: " + "y" * 100_000 + "\r\n", (400, 431)),
        ("POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n", (413,)),
        ("POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n", (400,)),
        ("NONSENSE\r\n", (400,)),
    ],
)
def test_each_fault_is_the_clients(daemon: RealDaemon, head: str, status: tuple[int, ...]) -> None:
    answer = b""
    with daemon.dial_control() as connection:
        connection.sendall(head.encode("utf-8", "surrogateescape") + b"\r\nabc")
        with suppress(ConnectionResetError):
            answer = connection.recv(1 << 16)
    assert statuses(answer)[0] in status, answer[:300]


def call_seconds(daemon: RealDaemon) -> float:
    begin = time.monotonic()
    assert daemon.control.get("/v1/status", StatusAnswer).state == "ready"
    return time.monotonic() - begin


def served(daemon: RealDaemon) -> bool:
    """False while connections that the flood has closed still count."""
    try:
        return call_seconds(daemon) < CALL_SECONDS
    except LimitError:
        return False


def hold(daemon: RealDaemon, number: int, data: bytes) -> list[socket.socket]:
    """So many connections that say this much and wait."""
    held = []
    for _ in range(number):
        connection = daemon.dial_control()
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(data)
        held.append(connection)
    return held


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /v1/st",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
    ],
    ids=["silent", "half a line", "half a head", "half a body", "answers that nobody reads"],
)
def test_held_connections_keep_nobody_out(daemon: RealDaemon, counter: Counter, data: bytes) -> None:
    """Nearly as many as one user may have, however far they went."""
    held = hold(daemon, 50, data)
    counter.add(len(held))
    assert max(call_seconds(daemon) for _ in range(5)) < CALL_SECONDS
    for connection in held:
        connection.close()


def test_a_users_connections_are_limited(daemon: RealDaemon, counter: Counter) -> None:
    """All over the limit are told why, in a flood too, and it is no more of a limit when the others have gone."""
    before = daemon.descriptors()
    held = hold(daemon, 400, b"GET /v1/st")
    counter.add(len(held))
    answered = lambda: select.select(held, [], [], 0)[0]  # noqa: E731
    daemon.until(lambda: len(answered()) >= 400 - 64, "refusing those over the limit", 5)
    assert daemon.descriptors() < before + 70
    assert all(b"429" in connection.recv(1000) for connection in answered())
    with pytest.raises(LimitError, match="64 connections"):
        daemon.control.get("/v1/status", StatusAnswer)
    for connection in held:
        connection.close()
    daemon.until(lambda: daemon.descriptors() <= before, "closing them", 5)
    assert call_seconds(daemon) < CALL_SECONDS


def test_slow_bytes_have_an_end(daemon: RealDaemon, counter: Counter) -> None:
    """A byte now and then does not keep a connection for ever."""
    over = threading.Event()
    lasted: list[float] = []

    def drip(data: bytes) -> None:
        begin = time.monotonic()
        with daemon.dial_control() as connection, suppress(OSError):
            for byte in data:
                if over.wait(0.2):
                    return
                connection.send(bytes([byte]))
        lasted.append(time.monotonic() - begin)

    head = b"GET /v1/status HTTP/1.1\r\nX: " + b"y" * 300
    dripping = [threading.Thread(target=drip, args=(head,)) for _ in range(3)]
    for thread in dripping:
        thread.start()
    for thread in dripping:
        thread.join(25)
    over.set()
    counter.add(len(dripping))
    assert len(lasted) == 3 and max(lasted) < 20


def test_a_flood_of_connections(daemon: RealDaemon, counter: Counter) -> None:
    for turn in range(EXAMPLES * 10):
        connection = daemon.dial_control()
        if turn % 3:
            connection.send(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n" if turn % 3 == 1 else b"\x16\x03\x01")
        connection.close()
        counter.add()
    daemon.until(lambda: served(daemon), "being served again", CALL_SECONDS)


def test_large_bodies_are_refused_without_being_held(daemon: RealDaemon) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    before = daemon.memory_bytes()
    with daemon.dial_control() as connection, suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(1000):
            connection.sendall(chunk)
    assert daemon.memory_bytes() - before < 32 << 20
    assert call_seconds(daemon) < CALL_SECONDS


def test_afterwards_all_is_as_before(daemon: RealDaemon) -> None:
    daemon.check()
    daemon.check_rest()
