"""One answer's way to the client, part by part, as the worker sends them: written straight to the client's connection,
counted for the metrics, held up where the client does not read.

A part costs no task and no timer. aiohttp writes head, end and error event; between them the parts go to its transport
in the coding that it announced. A client that is slower than its worker is waited for by not reading the worker: what
is held for it is what its transport takes at most, and one read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from aiohttp import web

from syshaxd.frontend.metrics import Series
from syshaxd.frontend.tokens import Tokens
from syshaxd.frontend.upstream import Answer

_LAST_SECONDS = 2.0
"""For a client that has stopped reading, to read the end."""


class Relay:
    """`heard` is called now and then while parts come."""

    __slots__ = (
        "_answer",
        "_before",
        "_chunked",
        "_every",
        "_heard",
        "_next",
        "_protocol",
        "_request",
        "_series",
        "_streamed",
        "_tokens",
        "_transport",
        "bytes_out",
        "full",
        "response",
        "tail",
    )

    def __init__(
        self, answer: Answer, response: web.StreamResponse, request: web.BaseRequest, series: Series, started: float
    ) -> None:
        self._answer, self.response, self._request, self._series = answer, response, request, series
        self._protocol, self._transport = request.protocol, request.transport
        self._streamed = is_event_stream(response)
        self._tokens = Tokens(series.prompt_tokens, series.generation_tokens, self._streamed)
        self._chunked = False
        self._before = started
        self._next = self._every = 0.0
        self._heard: Callable[[], None] = _nothing
        self.full = False
        """The client has not read what it was sent."""
        self.bytes_out = 0
        self.tail = b""
        """The last bytes passed, to know whether a stream stands at an event's end."""

    def tell(self, heard: Callable[[], None], every: float) -> None:
        """`heard` is called when a part comes and `every` seconds have passed since it was called."""
        self._heard, self._every = heard, every

    async def run(self) -> None:
        """Passes the answer to its end, as a complete one or as it failed (`answer.error`). Raises what
        aiohttp does where the client is gone."""
        answer, response = self._answer, self.response
        await response.prepare(self._request)
        begun, now = answer.take(), monotonic()
        if begun:
            self._next = now + self._every
            self._note(begun, now)
        if answer.complete:
            await response.write_eof(begun)
            return
        if begun:
            self._heard()
            await response.write(begun)
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        answer.pass_to(self._pass)
        while not answer.complete and answer.error is None:
            if self.full:
                await self._request.writer.drain()
                self.full = False
                answer.resume()
            else:
                await answer.wait()
        if answer.complete:
            await response.write_eof()

    def _pass(self, part: bytes) -> None:
        self._note(part, monotonic())
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # the task is being cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunked else part)
        if self._protocol.writing_paused and not self.full:
            self.full = True
            self._answer.pause()
            self._answer.wake()

    def _note(self, part: bytes, now: float) -> None:
        if self._streamed:
            series = self._series
            (series.between_tokens if self.bytes_out else series.first_token).observe(now - self._before)
            self._before = now
        if now > self._next:
            self._next = now + self._every
            self._heard()
        self._tokens.passed(part)
        self.bytes_out += len(part)
        self.tail = part[-4:] if len(part) >= 4 else (self.tail + part)[-4:]

    def close(self) -> None:
        """Nothing more comes. An error's body has no tokens."""
        if self.response.status < 400:
            self._tokens.end()

    async def break_off(self, event: bytes) -> None:
        """Ends an answer that has begun so that nobody takes it for complete: a stream with an error event, another by
        cutting the connection.

        After an error event the connection stays: a client that has read the whole answer may be sending its next
        request on it, which closing would lose. One that does not read is not waited for long.
        """
        transport = self._request.transport
        if transport is None or not self._streamed or self.response.content_length is not None:
            if transport is not None:
                transport.abort()
            return
        at_end = not self.tail or self.tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))
        event = (b"" if at_end else b"\n\n") + event
        self.bytes_out += len(event)
        if not self.full:
            await self.response.write(event)
            await self.response.write_eof()
            return
        transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self._chunked else event)
        transport.close()
        asyncio.get_running_loop().call_later(_LAST_SECONDS, transport.abort)


def _nothing() -> None:
    """Who listens is not known yet."""


class HeldHead(web.StreamResponse):
    """Its headers leave in one packet with the first part, which is at hand (aiohttp's own Response does the same)."""

    _send_headers_immediately = False


def is_event_stream(response: web.StreamResponse) -> bool:
    """Server-sent events that are not compressed, so that an event can be added."""
    kind = response.headers.get("Content-Type", "")
    return kind.lower().startswith("text/event-stream") and "Content-Encoding" not in response.headers
