"""The HTTP side of one process: connections, their number, and how they end. What is asked on them is in `app`.

Sockets, signals and systemd are `process`'s, and `supervisor`'s where several processes share the work.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import logging
import termios
from contextlib import suppress
from time import monotonic

from aiohttp import web

from syshaxd.frontend.app import App
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.errors import ApiError, Kind
from syshaxd.frontend.keys import KeyRing

log = logging.getLogger("syshax.api")
_GRACE_SECONDS = 0.25
"""A request that is on its way as we stop, on a connection that we hold, still gets its answer and then the close."""
_LOOK_SECONDS = 0.05
BREAK_OFF_SECONDS = 2.0
"""For the error events of what draining cut, to reach their clients."""
_TELL_SECONDS = 10.0
"""At most one line in the log in this time about connections that are refused."""


class _Connection(web.RequestHandler):
    """aiohttp's connection; malformed HTTP gets an OpenAI error object too."""

    __slots__ = ()

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
            error = ApiError(Kind.INTERNAL, "An internal error of syshax-api; its log has the details.")
        else:
            log.debug("malformed HTTP from %s: %s", request.remote, message)
            first_line = (message or str(exc)).strip().splitlines()[0]
            error = ApiError(Kind.BAD_REQUEST, f"This is not valid HTTP: {first_line.rstrip(':.')}.")
        response = error.response()
        response.force_close()
        return response

    def is_idle(self) -> bool:
        """No request is answered, and none lies in the socket."""
        if self._request_in_progress or self._messages:
            return False
        return self.transport is None or not _unread(self.transport)


class _Connections(web.Server):
    """Counts them on the board; those beyond limits.connections are told so and closed."""

    def __init__(self, app: App, config: ApiConfig) -> None:
        super().__init__(app.handle, handler_cancellation=True)
        self._kwargs = {
            "auto_decompress": False,
            "access_log": None,
            "keepalive_timeout": config.timeouts.keepalive_seconds,
            "max_line_size": int(config.limits.header),
            "max_field_size": int(config.limits.header),
            "max_headers": config.limits.headers,
        }
        self._open = app.board.cell(OPEN_CONNECTIONS)
        self._most = config.limits.connections
        self._told = -_TELL_SECONDS

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open.add(1)
        if self._open.total() > self._most:
            if monotonic() - self._told > _TELL_SECONDS:
                self._told = monotonic()
                log.warning("closing connections: there are %d, the limit (limits.connections)", self._most)
            transport.write(self._refusal())
            transport.close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open.add(-1)

    def _refusal(self) -> bytes:
        error = ApiError(
            Kind.OVERLOADED,
            f"There are {self._most} connections, the limit (limits.connections); try again later.",
        )
        body = error.body()
        head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


OPEN_CONNECTIONS = "connections"
"""The board's cell of clients' connections."""


def make_server(app: App, config: ApiConfig) -> web.Server:
    """aiohttp's server for the app: bodies stay encoded, a client that leaves cancels its request."""
    return _Connections(app, config)


def _unread(transport: asyncio.BaseTransport) -> int:
    """Bytes that the kernel holds for us."""
    found = array.array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, found)
    return found[0]


class Server:
    """The front-end in this process, without the sockets that it listens on."""

    def __init__(self, config: ApiConfig, keys: KeyRing | None, board: Board) -> None:
        self._config = config
        self.app = App(config, keys, board)
        self._http = make_server(self.app, config)
        self.runner = web.ServerRunner(self._http, shutdown_timeout=BREAK_OFF_SECONDS)

    async def start(self) -> None:
        await self.runner.setup()

    def protocol(self) -> asyncio.Protocol:
        """For one more connection."""
        return self._http()

    async def drain(self) -> None:
        """Finishes what runs within timeouts.drain_seconds, then ends it. Answers say so from now on."""
        seconds = self._config.timeouts.drain_seconds
        proxy = self.app.proxy
        log.info("stopping: %d requests have %g s to finish", len(proxy.active), seconds)
        proxy.draining = True
        await asyncio.sleep(0)  # what the kernel has accepted for us
        for site in list(self.runner.sites):
            await site.stop()
        if await self._all_closed(seconds):
            return
        log.warning("ending %d requests that did not finish in time", len(proxy.active))
        for exchange in list(proxy.active):
            exchange.end(ApiError(Kind.SHUTTING_DOWN, "The server is shutting down; send the request again."))
        await self._all_closed(BREAK_OFF_SECONDS)

    async def close(self) -> None:
        await self.runner.cleanup()
        await self.app.workers.close()

    async def _all_closed(self, seconds: float) -> bool:
        """Until every connection has ended. One that has just had its answer, which did not tell the end, may bring
        another request; so connections close when they have been idle for a moment."""
        deadline = monotonic() + seconds
        idle_since: dict[web.RequestHandler, float] = {}
        while self._http.connections or self.app.proxy.active:
            now = monotonic()
            for connection in self._http.connections:
                if not isinstance(connection, _Connection) or not connection.is_idle():
                    idle_since.pop(connection, None)
                elif now - idle_since.setdefault(connection, now) >= min(_GRACE_SECONDS, seconds):
                    connection.force_close()
            if now >= deadline:
                return not self.app.proxy.active
            await asyncio.sleep(_LOOK_SECONDS)
        return True
