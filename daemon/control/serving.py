"""The control API on its socket, and what the view socket shows of it.

Imported when the data plane serves already: aiohttp is most of what a start takes.

Owns the putting together of frame, routes and rights; knows nothing of what they do.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from syshax.protocol import ConfigChangeAnswer
from syshax.routes import ROUTES, VIEW_ROUTES
from syshaxd.control.app import make_app
from syshaxd.control.connections import Connections, http_log
from syshaxd.control.rights import Rights
from syshaxd.control.routes import Routes
from syshaxd.sockets import Listeners
from syshaxd.status import Parts, Reporter

BACKLOG = 128
"""Connections that the kernel holds; asyncio accepts at most so many before it looks at the others."""


async def serve_control(
    parts: Parts,
    reporter: Reporter,
    listeners: Listeners,
    own_user: bool,
    change_config: Callable[[Callable[[], ConfigChangeAnswer]], ConfigChangeAnswer],
    restart: Callable[[bool], None],
) -> list[web.AppRunner]:
    """Serves until their cleanup(). own_user: the daemon's own user is an administrator."""
    rights = Rights(parts.config.current, os.geteuid() if own_user else None)
    routes = Routes(parts, reporter, rights, change_config, restart)
    runners = [await _serve(parts, routes, tuple(ROUTES), listeners.control, Connections())]
    if listeners.view is not None:
        runners.append(await _serve(parts, routes, VIEW_ROUTES, listeners.view, _ViewConnections()))
    return runners


async def _serve(
    parts: Parts, routes: Routes, names: Sequence[str], listener: socket.socket, bounds: Connections
) -> web.AppRunner:
    app = make_app(parts.core, parts.boot, names, lambda router: routes.add_to(router, names))
    runner = web.AppRunner(app, access_log=None, logger=http_log, shutdown_timeout=2.0)
    await runner.setup()
    await _Site(runner, listener, bounds).start()
    return runner


class _ViewConnections(Connections):
    def enter(self, uid: int) -> str:
        return super().enter(uid).replace("control", "view")


class _Site(web.BaseSite):
    """The listening socket, with our bounds on its connections."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, bounds: Connections) -> None:
        super().__init__(runner)
        self._listener, self._serve, self._bounds = listener, runner.server, bounds

    @property
    def name(self) -> str:
        return f"http://unix:{self._listener.getsockname()}:"

    async def start(self) -> None:
        await super().start()
        assert self._serve is not None
        factory = self._bounds.wrap(self._serve)
        self._server = await asyncio.get_running_loop().create_server(factory, sock=self._listener, backlog=BACKLOG)
