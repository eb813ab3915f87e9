"""The control socket of syshax-api: its workers, for administrators, by `syshaxctl workers` or curl.

Owns its routes and who may use them, as the kernel tells: root, the group control.admin_group, the process's own user.
Frame, bounds on connections and the form of errors are those of the daemon's control API.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path

from aiohttp import web

from syshax.front import (
    FRONT_ROUTES,
    WorkerAddRequest,
    WorkerChangeAnswer,
    WorkerDrainRequest,
    WorkersAnswer,
)
from syshaxd.control.app import Site, json_answer, make_app, read_body
from syshaxd.control.connections import Connections, http_log
from syshaxd.control.rights import Rights
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.fleet import Fleet
from syshaxd.peers import peer_of
from syshaxd.sockets import bind_path

log = logging.getLogger("syshax.api")
_BODY_BYTES = 16 << 10


def socket_path(config: ApiConfig) -> Path | None:
    """Where it is to lie; None: nowhere."""
    if config.control.socket:
        return Path(config.control.socket)
    directory = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(directory) / "control.sock" if directory else None


class Control:
    """Serves from `start` to `close`."""

    def __init__(self, config: ApiConfig, fleet: Fleet) -> None:
        self._fleet = fleet
        self._boot = secrets.token_hex(8)
        self._path = socket_path(config)
        self._drain_seconds = config.timeouts.drain_seconds
        self._rights = Rights(lambda: config.control.admin_group, os.geteuid())
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises `SyshaxError` when the socket cannot be made."""
        if self._path is None:
            return
        listener = bind_path(self._path, socket.SOCK_STREAM, None)
        self._path.chmod(0o666)  # who connects is asked by the kernel, and told who may
        listener.setblocking(False)
        app = make_app(lambda error: error, self._boot, tuple(FRONT_ROUTES), self._add_routes)
        self._runner = web.AppRunner(app, access_log=None, logger=http_log, shutdown_timeout=2.0)
        await self._runner.setup()
        await Site(self._runner, listener, Connections()).start()

    async def close(self) -> None:
        if self._runner is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            await self._runner.cleanup()

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        table = {
            "GET /v1/workers": self.workers,
            "POST /v1/workers": self.add,
            "PATCH /v1/workers/{url}": self.drain,
            "DELETE /v1/workers/{url}": self.remove,
        }
        for route in FRONT_ROUTES:
            method, path = route.split()
            router.add_route(method, path, table[route])

    async def workers(self, request: web.Request) -> web.StreamResponse:
        self._check(request, "see workers")
        processes, workers = await self._fleet.look()
        return json_answer(WorkersAnswer(boot_id=self._boot, processes=processes, workers=workers))

    async def add(self, request: web.Request) -> web.StreamResponse:
        self._check(request, "add workers")
        asked = await read_body(request, WorkerAddRequest, _BODY_BYTES)
        wanted = await self._fleet.add(asked.url, asked.group)
        return self._changed(wanted.url, wanted.group, "is added and gets requests once it is ready")

    async def drain(self, request: web.Request) -> web.StreamResponse:
        self._check(request, "drain workers")
        asked = await read_body(request, WorkerDrainRequest, _BODY_BYTES)
        wanted = await self._fleet.drain(request.match_info["url"], asked.draining)
        message = "finishes what it has and gets no new requests" if asked.draining else "gets requests again"
        return self._changed(wanted.url, wanted.group, message)

    async def remove(self, request: web.Request) -> web.StreamResponse:
        self._check(request, "remove workers")
        wanted = await self._fleet.remove(request.match_info["url"])
        message = f"finishes what it has within {self._drain_seconds:g} s, then it is gone"
        return self._changed(wanted.url, wanted.group, message)

    def _check(self, request: web.Request, what: str) -> None:
        assert request.transport is not None
        self._rights.require_administrator(peer_of(request.transport.get_extra_info("socket")), what)

    def _changed(self, url: str, group: str, message: str) -> web.StreamResponse:
        log.info("worker %s %s", url, message)
        permanent = self._fleet.permanent(group)
        return json_answer(
            WorkerChangeAnswer(boot_id=self._boot, url=url, group=group, message=message, permanent=permanent)
        )
