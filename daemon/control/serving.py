"""The control API on its socket, and what the view socket shows of it.

Imported when the data plane serves already: aiohttp is most of what a start takes.

Owns the putting together of frame, routes and rights; knows nothing of what they do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from syshax.protocol import ConfigChangeAnswer
from syshax.routes import ROUTES, VIEW_ROUTES
from syshaxd.control.app import Site, make_app
from syshaxd.control.connections import Connections, http_log, take_any_target
from syshaxd.control.rights import Rights
from syshaxd.control.routes import Routes
from syshaxd.core import translated
from syshaxd.sockets import Listeners
from syshaxd.status import Parts, Reporter


async def serve_control(
    parts: Parts,
    reporter: Reporter,
    listeners: Listeners,
    own_user: bool,
    change_config: Callable[[Callable[[], ConfigChangeAnswer]], ConfigChangeAnswer],
    restart: Callable[[bool], None],
) -> list[web.AppRunner]:
    """Serves until their cleanup(). own_user: the daemon's own user is an administrator."""
    rights = Rights(lambda: parts.config.current().access.admin_group, os.geteuid() if own_user else None)
    routes = Routes(parts, reporter, rights, change_config, restart)
    runners = [await _serve(parts, routes, tuple(ROUTES), listeners.control, Connections())]
    if listeners.view is not None:
        runners.append(await _serve(parts, routes, VIEW_ROUTES, listeners.view, _ViewConnections()))
    return runners


async def _serve(
    parts: Parts, routes: Routes, names: Sequence[str], listener: socket.socket, bounds: Connections
) -> web.AppRunner:
    app = make_app(partial(translated, parts.core), parts.boot, names, lambda router: routes.add_to(router, names))
    runner = web.AppRunner(app, access_log=None, logger=http_log, shutdown_timeout=2.0)
    await runner.setup()
    assert runner.server is not None
    take_any_target(runner.server)
    await Site(runner, listener, bounds).start()
    return runner


class _ViewConnections(Connections):
    def enter(self, uid: int) -> str:
        return super().enter(uid).replace("control", "view")
