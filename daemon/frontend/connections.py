"""Clients' connections: how many there may be, in all and from one address, and how long a request's head may take.

A connection that has said nothing, or nothing since its last answer, ends by timeouts.keepalive_seconds. One that has
begun a head and does not finish it is looked for here, now and then; a timer for each head would cost every request.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import termios
from collections import Counter
from contextlib import suppress
from time import monotonic

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError, _ErrInfo

from syshaxd.control.connections import take_any_target
from syshaxd.frontend.app import App
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.errors import ApiError, Kind, internal
from syshaxd.frontend.silence import Patience

log = logging.getLogger("syshax.api")
OPEN_CONNECTIONS = "connections"
"""The board's cell of clients' connections."""
_TELL_SECONDS = 10.0
"""At most one line in the log in this time about connections that are refused."""
_LOOKS_PER_LIMIT = 8
_WRITE_BYTES = 1 << 18
"""What waits for a client before its worker is held up. asyncio's 64 KiB are less than a read: the two would take
turns."""
_PATIENCE = Patience(idle=30, every=15, probes=4)
"""A client that waits for an answer and whose host has vanished counts as gone after 90 s. One that is there and reads
nothing has timeouts.idle_seconds."""
_STATUS_LINES = {408: "408 Request Timeout", 429: "429 Too Many Requests"}


class Connection(web.RequestHandler):
    """aiohttp's connection; malformed HTTP gets an OpenAI error object too."""

    __slots__ = ("address", "begun")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.begun = 0.0
        """When the head came first that is not complete; 0: there is none."""
        self.address = _address(transport)
        super().connection_made(transport)
        if self.transport is not None:  # it was not refused
            self.transport.set_write_buffer_limits(high=_WRITE_BYTES)
            _PATIENCE.hold_for(self.transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self._messages) == 1 and isinstance(self._messages[0][0], _ErrInfo):
            self._end_body(self._messages[0][0].message)
        if self._messages or self._request_in_progress:
            self.begun = 0.0
        elif not self.begun and data:
            self.begun = monotonic()

    def _end_body(self, message: str) -> None:
        """What came is malformed. If it is the body that a request waits for, that request hears of it and is the last
        one; aiohttp keeps it waiting."""
        request = self._current_request
        if request is not None and not request.content.is_eof():
            self._messages.clear()
            request.content.set_exception(RequestPayloadError(_fault(message)))
            request.content.feed_eof()
            self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionError("the client is gone, or an answer has begun")
        if status >= 500:
            log.error("answering failed", exc_info=exc)
            error = internal()
        else:
            fault = _fault(message or str(exc))
            log.debug("malformed HTTP from %s: %s", request.remote, fault)
            error = ApiError(Kind.BAD_REQUEST, f"This is not valid HTTP: {fault}.")
        response = error.response()
        response.force_close()
        return response

    def is_idle(self) -> bool:
        """No request is answered, and none lies in the socket."""
        if self._request_in_progress or self._messages:
            return False
        return self.transport is None or not _unread(self.transport)

    def refuse(self, error: ApiError) -> None:
        """Tells it and closes."""
        if self.transport is not None:
            body = error.body()
            lines = [f"HTTP/1.1 {_STATUS_LINES[error.kind.status]}", "Content-Type: application/json"]
            lines += [f"{name}: {value}" for name, value in error.headers]
            lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
            self.transport.write("\r\n".join(lines).encode() + body)
            self.force_close()


class Connections(web.Server):
    """Counts them: all on the board, those from one address for this process, which has its part of that limit (the
    processes get about as many each). Those beyond a limit are told so and closed."""

    def __init__(self, app: App, config: ApiConfig) -> None:
        super().__init__(app.handle, handler_cancellation=True)
        take_any_target(self)
        self._kwargs = {
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": config.timeouts.keepalive_seconds,
            "max_line_size": int(config.limits.header),
            "max_field_size": int(config.limits.header),
            "max_headers": config.limits.headers,
        }
        self._open = app.board.cell(OPEN_CONNECTIONS)
        self._limits = config.limits
        self._by_address: Counter[str] = Counter()
        self._most_by_address = -(-config.limits.connections_per_address // config.processes)
        self._head_seconds = config.timeouts.header_seconds
        self._looking = False
        self._told = -_TELL_SECONDS

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        assert isinstance(handler, Connection)
        self._open.add(1)
        self._by_address[handler.address] += 1
        if not self._looking:
            self._looking = True
            self._look_later()
        if self._open.total() > self._limits.connections:
            self._refuse(handler, self._limits.connections, "limits.connections")
        elif self._most_by_address and handler.address and self._by_address[handler.address] > self._most_by_address:
            limit = self._limits.connections_per_address
            self._refuse(handler, limit, "limits.connections_per_address", " from one address")

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        assert isinstance(handler, Connection)
        self._open.add(-1)
        self._by_address[handler.address] -= 1
        if not self._by_address[handler.address]:
            del self._by_address[handler.address]

    def _refuse(self, handler: Connection, limit: int, name: str, where: str = "") -> None:
        if monotonic() - self._told > _TELL_SECONDS:
            self._told = monotonic()
            log.warning("closing connections: there are %d%s, the limit (%s)", limit, where, name)
        text = f"There are {limit} connections{where}, the limit ({name}); try again later."
        handler.refuse(ApiError(Kind.OVERLOADED, text, headers=(("Retry-After", "1"),)))

    def _look_later(self) -> None:
        self._loop.call_later(self._head_seconds / _LOOKS_PER_LIMIT, self._look)

    def _look(self) -> None:
        """For heads that do not end."""
        before = monotonic() - self._head_seconds
        for connection in self.connections:
            if isinstance(connection, Connection) and 0 < connection.begun < before:
                text = f"The request's head did not arrive within {self._head_seconds:g} s."
                connection.refuse(ApiError(Kind.SLOW_BODY, text))
        self._looking = bool(self.connections)
        if self._looking:
            self._look_later()


def _fault(message: str) -> str:
    """Its first line: further ones show what was sent, which may be a key."""
    return message.strip().splitlines()[0].rstrip(":.")


def _address(transport: asyncio.BaseTransport) -> str:
    """The peer's, without its port; "" where it has none (a Unix socket)."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _unread(transport: asyncio.BaseTransport) -> int:
    """Bytes that the kernel holds for us."""
    found = array.array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, found)
    return found[0]
