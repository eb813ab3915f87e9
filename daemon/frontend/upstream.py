"""HTTP/1.1 to one worker: connections that are kept, requests that leave in one piece, answers that arrive as calls.

The hot path: a streamed event goes from the worker's socket to `Answer.sink` without a task being woken, which costs a
third of what aiohttp's client does (docs/decisions/0018); httptools parses. Owns connections and what a failure means
for the request (`WorkerError`); knows nothing of clients, retries or time limits but that for connecting.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

from syshaxd.frontend.request import HOP_BY_HOP
from syshaxd.frontend.silence import Patience

_KEEPALIVE_SECONDS = 4.0
"""Below uvicorn's 5 s, so that a connection is rarely taken from the pool as the worker closes it."""
_PATIENCE = Patience(idle=10, every=5, probes=3, unread=25)
"""A worker whose host has vanished fails within 25 s, whether a request waits for its answer or is on its way to it."""
_HELD_BYTES = 1 << 16
"""So much of an answer waits here for a sink, and a read more."""
_APART_BYTES = 1 << 14
"""Larger bodies are not copied behind the head."""
_HEAD_LINES = 16
"""An answer's head may be so many times limits.header."""
_BODYLESS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
"""Methods whose requests say nothing of a body that they do not have."""
_HOP_BY_HOP = frozenset(name.encode() for name in HOP_BY_HOP)


class WorkerError(Exception):
    """What went wrong with a worker, in a few words, without its address. `unsent`: the request cannot have reached
    it."""

    def __init__(self, reason: str, unsent: bool = False) -> None:
        super().__init__(reason)
        self.unsent = unsent


class Answer:
    """A worker's answer on its way. The one task that waits here is woken by its head, its first bytes, its end and
    `wake`; once `sink` is set it gets each part of the body instead, as it is read."""

    __slots__ = ("_connection", "_held", "_waiter", "complete", "error", "headers", "reason", "sink", "status")

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        """0 until the head is there."""
        self.reason = ""
        self.headers: CIMultiDict[str] = CIMultiDict()
        """The end-to-end ones, Content-Length among them."""
        self.complete = False
        self.error: WorkerError | None = None
        self.sink: Callable[[bytes], None] | None = None
        self._held = b""
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None

    async def begin(self, seconds: float) -> bool:
        """Waits for the head, then up to `seconds` for the first bytes of the body; whether these or the end came.
        `WorkerError` when it fails before them."""
        while not self.status and self.error is None:
            await self.wait()
        if seconds and not (self._held or self.complete or self.error):
            loop = asyncio.get_running_loop()
            timer = loop.call_later(seconds, self.wake)
            try:
                await self.wait()
            finally:
                timer.cancel()
        if self.error is not None:
            raise self.error
        return bool(self._held or self.complete)

    def take(self) -> bytes:
        """What has come of the body and was not taken."""
        held, self._held = self._held, b""
        return held

    def pass_to(self, sink: Callable[[bytes], None]) -> None:
        """From now on `sink` gets the body, what waits here first."""
        self.sink = sink
        if held := self.take():
            sink(held)
        self.resume()

    async def wait(self) -> None:
        """Until something has changed."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Ends `wait`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pause(self) -> None:
        """Reads nothing more from the worker, which is held up when the sockets' buffers are full."""
        if self._under_way():
            self._connection.pause()

    def resume(self) -> None:
        if self._under_way():
            self._connection.resume()

    def _under_way(self) -> bool:
        """The connection is this answer's still."""
        return not self.complete and self.error is None

    def close(self) -> None:
        """An answer that is not complete ends here, and the worker sees it: its connection is closed."""
        self.sink = None
        self._connection.leave(self)

    def arrived(self, data: bytes) -> None:
        if self.sink is not None:
            self.sink(data)
            return
        self._held = self._held + data if self._held else data
        if len(self._held) > _HELD_BYTES:
            self._connection.pause()
        self.wake()

    def ended(self, error: WorkerError | None) -> None:
        if self.complete or self.error is not None:
            return
        self.complete, self.error = error is None, error
        self.wake()


class _Connection(asyncio.Protocol):
    """One connection: a parser, and the answer under way, if there is one."""

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._parts: list[bytes] = []
        self._reason = self._hops = b""
        self._headless = True
        self._head_bytes = 0
        self._to_the_end = self._finished = self._reusable = self._paused = False
        self._empty = False
        """The answer has no body, whatever its head says (HEAD)."""
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _PATIENCE.hold_for(transport)

    def send(self, head: bytes, body: bytes, empty: bool) -> Answer:
        """The request leaves; the answer is what comes next on this connection."""
        if self.transport.is_closing():
            raise WorkerError("it closed the connection", unsent=True)
        answer = self._answer = Answer(self)
        self._empty, self._headless, self._head_bytes = empty, True, 0
        self._to_the_end = self._finished = False
        if len(body) <= _APART_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        return answer

    def usable(self) -> bool:
        return not self.transport.is_closing()

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def leave(self, answer: Answer) -> None:
        """Nobody waits for `answer` any more."""
        if self._answer is answer:
            self._answer = None
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.transport.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(WorkerError("it changes to another protocol"))
            return
        except httptools.HttpParserError:
            self._deliver(answer)
            if not self._finished:
                words = "it does not speak HTTP as expected" if self._headless else "its answer broke off"
                self._fail(WorkerError(words))
                return
            self._reusable = False  # more than was asked for
        if self._parts:
            self._deliver(answer)
        if self._finished:
            self._finish(answer)
        elif self._headless:
            self._head_bytes += len(data)
            if self._head_bytes > self._upstream.head_bytes:
                self._fail(WorkerError("the head of its answer is too large"))

    def _deliver(self, answer: Answer) -> None:
        parts = self._parts
        if parts:
            self._parts = []
            answer.arrived(parts[0] if len(parts) == 1 else b"".join(parts))

    def _finish(self, answer: Answer) -> None:
        if self._answer is answer:
            self._answer = None
            if self._reusable and not self.transport.is_closing():
                self.resume()
                self._upstream.keep(self)
            else:
                self.transport.close()
        answer.ended(None)

    def _fail(self, error: WorkerError) -> None:
        answer, self._answer = self._answer, None
        self.transport.abort()
        if answer is not None:
            answer.ended(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.drop(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._to_the_end and exc is None:
            answer.ended(None)
        elif not self._headless:
            answer.ended(WorkerError("its answer broke off"))
        elif exc is None:
            answer.ended(WorkerError("it closed the connection"))
        else:
            answer.ended(WorkerError(describe(exc)))

    # What httptools calls.

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headless or self._answer is None:
            return  # a trailer
        lower = name.lower()
        if lower == b"connection":
            self._hops += b"," + value
        if lower in _HOP_BY_HOP:
            self._to_the_end = self._to_the_end or lower == b"transfer-encoding"
            return
        self._answer.headers.add(name.decode("ascii", "replace"), value.decode("utf-8", "replace"))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        reason, hops, coded = self._reason, self._hops, self._to_the_end
        self._reason = self._hops = b""
        self._to_the_end = False
        if answer is None or not self._headless:
            return
        if status < 200:  # only that more is to come
            answer.headers.clear()
            return
        for name in hops.lower().split(b",") if hops else ():
            answer.headers.popall(name.strip().decode("ascii", "replace"), None)
        self._headless = False
        self._reusable = self._parser.should_keep_alive() and not self._empty
        # Without a length the end of the connection is the end; llhttp says so by not keeping it.
        self._to_the_end = not coded and "Content-Length" not in answer.headers
        answer.status, answer.reason = status, reason.decode("utf-8", "replace")
        if self._empty:
            self._finished = True
        answer.wake()

    def on_body(self, data: bytes) -> None:
        if not self._finished:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._finished:
            self._reusable = False  # more than was asked for
        self._finished = not self._headless


class Upstream:
    """The connections to one worker."""

    def __init__(self, url: str, connect_seconds: float, header_bytes: int) -> None:
        """`url`: as the configuration has it, http://HOST:PORT, https://HOST:PORT or unix:PATH."""
        self.head_bytes = _HEAD_LINES * header_bytes
        self._connect_seconds = connect_seconds
        self._path = url.removeprefix("unix:") if url.startswith("unix:") else ""
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._host_line = b"Host: worker\r\n" if self._path else f"Host: {parts.netloc}\r\n".encode()
        self._idle: list[_Connection] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(self, method: str, target: str, headers: bytes, body: bytes = b"") -> Answer:
        """Sends a request on a kept connection or a new one. `headers`: whole lines, neither Host nor Content-Length.
        `WorkerError` when there is no connection."""
        length = b"Content-Length: %d\r\n" % len(body) if body or method not in _BODYLESS else b""
        start = f"{method} {target.partition('#')[0]} HTTP/1.1\r\n".encode("utf-8", "surrogateescape")
        head = b"".join((start, self._host_line, headers, length, b"\r\n"))
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection.send(head, body, method == "HEAD")
        return (await self._connect()).send(head, body, method == "HEAD")

    async def get(self, path: str, headers: bytes = b"") -> tuple[int, bytes]:
        """Status and body; `headers` as lines. `WorkerError`."""
        answer = await self.send("GET", path, headers)
        parts: list[bytes] = []
        try:
            await answer.begin(0)
            answer.pass_to(parts.append)
            while not answer.complete:
                if answer.error is not None:
                    raise answer.error
                await answer.wait()
            return answer.status, b"".join(parts)
        finally:
            answer.close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                if self._path:
                    _, made = await loop.create_unix_connection(lambda: _Connection(self), self._path)
                else:
                    _, made = await loop.create_connection(
                        lambda: _Connection(self), self._host, self._port, ssl=self._tls
                    )
        except TimeoutError as error:
            words = describe(error) if error.errno else "no connection in time"
            raise WorkerError(words, unsent=True) from None
        except OSError as error:
            raise WorkerError(describe(error), unsent=True) from None
        return made

    def keep(self, connection: _Connection) -> None:
        """It may serve the next request."""
        if self._closed:
            connection.transport.close()
            return
        connection.idle_since = monotonic()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweep_later()

    def drop(self, connection: _Connection) -> None:
        """It is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_KEEPALIVE_SECONDS / 4, self._sweep)

    def _sweep(self) -> None:
        """The oldest are first, since the newest is taken first."""
        limit = monotonic() - _KEEPALIVE_SECONDS * 3 / 4
        kept = next((n for n, each in enumerate(self._idle) if each.idle_since > limit), len(self._idle))
        old, self._idle = self._idle[:kept], self._idle[kept:]
        for connection in old:
            connection.transport.close()
        self._sweeper = None
        if self._idle:
            self._sweep_later()

    async def close(self) -> None:
        """Ends the connections that no request uses."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in self._idle:
            connection.transport.close()
        self._idle = []
        await asyncio.sleep(0)


def describe(error: BaseException) -> str:
    """A failure in a few words, without the worker's address."""
    if isinstance(error, socket.gaierror):
        return "its host name does not resolve"
    if isinstance(error, ssl.SSLError):
        return "TLS with it fails"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()  # its own text may hold the address
    if isinstance(error, OSError):
        return "no connection to it"
    return str(error)
