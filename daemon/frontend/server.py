"""The HTTP side of one process: its beginning, and its end without a connection cut that has a request. What is asked
is in `app`, the connections are `connections`'.

Sockets, signals and systemd are `process`'s, and `supervisor`'s where several processes share the work.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from aiohttp import web

from syshaxd.frontend.app import App
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.connections import Connection, Connections
from syshaxd.frontend.errors import ApiError, Kind
from syshaxd.frontend.keys import KeyRing

log = logging.getLogger("syshax.api")
_GRACE_SECONDS = 0.25
"""A request that is on its way as we stop, on a connection that we hold, still gets its answer and then the close."""
_LOOK_SECONDS = 0.05
BREAK_OFF_SECONDS = 2.0
"""For the error events of what draining cut, to reach their clients."""


class Server:
    """The front-end in this process, without the sockets that it listens on."""

    def __init__(self, config: ApiConfig, keys: KeyRing | None, board: Board) -> None:
        self._config = config
        self.app = App(config, keys, board)
        self._http = Connections(self.app, config)
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
        self.app.console.close()
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
                if not isinstance(connection, Connection) or not connection.is_idle():
                    idle_since.pop(connection, None)
                elif now - idle_since.setdefault(connection, now) >= min(_GRACE_SECONDS, seconds):
                    connection.force_close()
            if now >= deadline:
                return not self.app.proxy.active
            await asyncio.sleep(_LOOK_SECONDS)
        return True
