"""The control API on its socket. Imported when the data plane serves already: aiohttp is most of what a start takes.

Owns the putting together of frame, routes and rights; knows nothing of what they do.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from aiohttp import web

from syshax.protocol import ConfigChangeAnswer
from syshaxd.control.app import make_app
from syshaxd.control.rights import Rights
from syshaxd.control.routes import Routes
from syshaxd.status import Parts, Reporter


async def serve_control(
    parts: Parts,
    reporter: Reporter,
    listener: socket.socket,
    own_user: bool,
    change_config: Callable[[Callable[[], ConfigChangeAnswer]], ConfigChangeAnswer],
    restart: Callable[[bool], None],
) -> web.AppRunner:
    """Serves until its cleanup(). own_user: the daemon's own user is an administrator."""
    rights = Rights(parts.config.current, os.geteuid() if own_user else None)
    routes = Routes(parts, reporter, rights, change_config, restart)
    runner = web.AppRunner(make_app(parts.core, parts.boot, routes.add_to), access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner
