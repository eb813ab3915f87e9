"""The client to the workers: answers of every form, cut anywhere, are what was sent or a failure, never half an answer
that looks whole; connections are used again only where that is safe."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syshaxd.frontend.upstream import Answer, Upstream, WorkerError, _Connection, describe

LIMIT = 4096


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def get_extra_info(self, name: str) -> None:
        """It has no socket."""

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def connection() -> tuple[Upstream, Any, Wire]:
    upstream, wire = Upstream("http://h:1", 1.0, LIMIT), Wire()
    made = _Connection(upstream)
    made.connection_made(wire)  # type: ignore[arg-type]
    return upstream, made, wire


names = st.text("abcdefgh-XYZ", min_size=1, max_size=8).map(lambda name: f"X-{name}")
values = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), max_size=20)
parts = st.lists(st.binary(min_size=1, max_size=60), max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, int, list[tuple[str, str]], bytes, str]:
    """(bytes on the wire, status, headers that pass, body, form)."""
    status = draw(st.sampled_from((200, 201, 204, 304, 400, 404, 418, 500, 503)))
    headers = draw(st.lists(st.tuples(names, values), max_size=4))
    pieces = draw(parts)
    form = "none" if status in (204, 304) else draw(st.sampled_from(("length", "chunked", "end")))
    body = b"" if form == "none" else b"".join(pieces)
    early = draw(st.sampled_from((b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n")))
    lines = [f"HTTP/1.1 {status} Some Reason", *(f"{name}: {value}" for name, value in headers)]
    coded = body
    if form == "length":
        lines.append(f"Content-Length: {len(body)}")
    elif form == "chunked":
        lines.append("Transfer-Encoding: chunked")
        trailer = draw(st.sampled_from((b"", b"X-Trailer: 1\r\n")))
        coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"
    wire = early + "\r\n".join([*lines, "", ""]).encode() + coded
    passed = [(name, value) for name, value in headers]
    return wire, status, passed + ([("Content-Length", str(len(body)))] if form == "length" else []), body, form


def feed(made: Any, wire: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    for begin, end in pairwise(places):
        made.data_received(wire[begin:end])


@settings(deadline=None)
@given(answer=answers(), cuts=st.lists(st.integers(0, 10**6), max_size=6), sunk=st.booleans())
async def test_an_answer_is_what_was_sent_wherever_it_is_cut(
    answer: tuple[bytes, int, list[tuple[str, str]], bytes, str], cuts: list[int], sunk: bool
) -> None:
    wire, status, headers, body, form = answer
    upstream, made, _ = connection()
    found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    taken: list[bytes] = []
    if sunk:
        found.pass_to(taken.append)
    feed(made, wire, cuts)
    if form == "end":
        assert not found.complete
        made.connection_lost(None)
    assert found.complete and found.error is None
    assert (found.status, found.reason) == (status, "Some Reason")
    assert [(name, value.strip()) for name, value in found.headers.items()] == headers
    assert b"".join(taken) + found.take() == body
    assert (made in upstream._idle) == (form != "end")
    await upstream.close()


@settings(deadline=None)
@given(answer=answers(), cut=st.integers(0, 10**6), reset=st.booleans())
async def test_an_answer_that_breaks_off_is_a_failure(
    answer: tuple[bytes, int, list[tuple[str, str]], bytes, str], cut: int, reset: bool
) -> None:
    wire, _, _, _, form = answer
    upstream, made, _ = connection()
    found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    feed(made, wire[: cut % len(wire)], [])
    complete = found.complete
    made.connection_lost(ConnectionResetError(104, "127.0.0.1:8000 reset") if reset else None)
    if form == "end" and found.status and not reset:
        assert found.complete, "nothing but the end of the connection tells the end of such an answer"
    elif not complete:
        assert found.error is not None and not found.complete
        assert "127" not in str(found.error)
    await upstream.close()


@given(first=answers(), second=answers())
async def test_answers_after_one_another_on_one_connection(first: Any, second: Any) -> None:
    upstream, made, wire = connection()
    for bytes_sent, status, headers, body, form in (first, second):
        if form == "end":
            return
        found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
        upstream._idle.clear()
        made.data_received(bytes_sent)
        assert found.complete and found.status == status and found.take() == body
        assert [(name, value.strip()) for name, value in found.headers.items()] == headers
        assert not wire.closed
    await upstream.close()


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 101 Up\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "broke off"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 17 * LIMIT, "too large"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 17 * LIMIT, "too large"),
    ],
)
async def test_what_is_no_answer(wire: bytes, reason: str) -> None:
    _, made, transport = connection()
    found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    for begin in range(0, len(wire), 1000):
        made.data_received(wire[begin : begin + 1000])
        if transport.closed:
            break
    assert found.error is not None and reason in str(found.error) and transport.closed


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"junk", b"\r\n\r\nx"])
async def test_a_connection_that_says_more_than_it_was_asked_for_is_not_used_again(more: bytes) -> None:
    upstream, made, wire = connection()
    found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab" + more)
    assert found.complete and found.take() == b"ab"
    assert wire.closed and not upstream._idle
    upstream, made, wire = connection()
    found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab")
    made.data_received(more)
    assert found.complete and wire.closed
    await upstream.close()


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
async def test_what_the_worker_says_of_its_connection_is_kept(head: bytes, kept: bool) -> None:
    upstream, made, wire = connection()
    found = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    made.data_received(head + b"Content-Length: 0\r\n\r\n")
    assert found.complete and wire.closed != kept and (made in upstream._idle) == kept
    await upstream.close()


async def test_an_answer_to_head_has_no_body_whatever_its_length() -> None:
    upstream, made, wire = connection()
    found = made.send(b"HEAD / HTTP/1.1\r\n\r\n", b"", True)
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert found.complete and found.headers["Content-Length"] == "5" and not found.take() and wire.closed
    await upstream.close()


async def test_little_is_held_for_an_answer_that_nobody_takes() -> None:
    _, made, wire = connection()
    found: Answer = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 60_000)
    assert not wire.paused
    made.data_received(b"x" * 60_000)
    assert wire.paused
    taken: list[bytes] = []
    found.pass_to(taken.append)
    assert len(b"".join(taken)) == 120_000 and not wire.paused
    found.pause()
    assert wire.paused
    found.close()
    assert wire.closed


async def test_an_answer_that_has_ended_does_not_hold_up_the_next_one_on_its_connection() -> None:
    _, made, wire = connection()
    first: Answer = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    first.pause()
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert first.complete and not wire.paused
    second: Answer = made.send(b"GET / HTTP/1.1\r\n\r\n", b"", False)
    first.pause()
    assert not wire.paused
    second.pause()
    first.resume()
    first.close()
    assert wire.paused and not wire.closed


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def served(serve: Serve) -> tuple[asyncio.Server, Upstream]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 1.0, LIMIT)


async def test_connections_are_kept_used_again_and_closed_when_idle() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    server, upstream = await served(serve)
    for _ in range(5):
        assert await upstream.get("/x") == (200, b"ok")
    assert connections == 1
    assert [status for status, _ in await asyncio.gather(*(upstream.get("/x") for _ in range(4)))] == [200] * 4
    assert connections == 4 and len(upstream._idle) == 4
    for kept in upstream._idle:
        kept.idle_since -= 10
    upstream._sweep()
    assert not upstream._idle
    await upstream.get("/x")
    await upstream.close()
    server.close()


async def test_a_request_reaches_the_worker_in_one_piece_whatever_its_size() -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
            seen.put_nowait(head + await reader.readexactly(length))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    server, upstream = await served(serve)
    for size in (0, 1, 16384, 16385, 1 << 22):
        body = b"x" * size
        answer = await upstream.send("POST", "/v1/x?y=%2F#part", b"A: b\r\n", body)
        await answer.begin(1)
        assert answer.complete and answer.status == 204
        got = await seen.get()
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (
            got
            == f"POST /v1/x?y=%2F HTTP/1.1\r\nHost: {host}\r\nA: b\r\nContent-Length: {size}\r\n\r\n".encode() + body
        )
        answer.close()
    await upstream.close()
    server.close()


async def test_failures_to_connect() -> None:
    cases = {
        "http://127.0.0.1:1": "connection refused",
        "unix:/nonexistent/worker.sock": "no such file or directory",
        "http://no.such.host.invalid:80": "its host name does not resolve",
    }
    for url, reason in cases.items():
        upstream = Upstream(url, 5.0, LIMIT)
        with pytest.raises(WorkerError) as caught:
            await upstream.get("/")
        assert str(caught.value) == reason and caught.value.unsent
    assert describe(ssl.SSLError(1, "x")) == "TLS with it fails"


async def test_a_connection_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream("http://127.0.0.1:1", 0.05, LIMIT)

    async def never(*words: Any, **more: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    with pytest.raises(WorkerError, match="no connection in time") as caught:
        await upstream.get("/")
    assert caught.value.unsent


async def test_a_worker_that_closes_without_an_answer() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server, upstream = await served(serve)
    with pytest.raises(WorkerError, match="it closed the connection") as caught:
        await upstream.get("/")
    assert not caught.value.unsent, "it may have been computed"
    server.close()
