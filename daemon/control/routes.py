"""The control API's routes: each reads a request, asks one part of the daemon, and gives its answer.

Owns the mapping of syshax.routes.ROUTES to the parts. No logic beyond rights and arguments lives here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from aiohttp import web

from syshax.errors import InvalidArgumentError
from syshax.protocol import (
    CachePruneRequest,
    Closing,
    ConfigChangeAnswer,
    ConfigSetRequest,
    DoctorAnswer,
    LoadRequest,
    ModelsAnswer,
    RestartAnswer,
    RestartRequest,
    SessionChange,
    SessionsAnswer,
    UnloadAnswer,
)
from syshaxd.control.app import Handler, json_answer, read_body
from syshaxd.control.rights import Rights
from syshaxd.peers import Peer, peer_of
from syshaxd.session import Session
from syshaxd.status import Parts, Reporter


class Routes:
    """`change_config` applies a change of the configuration to the parts, `restart(drain)` has the daemon end and begin
    anew: both are the server's."""

    def __init__(
        self,
        parts: Parts,
        reporter: Reporter,
        rights: Rights,
        change_config: Callable[[Callable[[], ConfigChangeAnswer]], ConfigChangeAnswer],
        restart: Callable[[bool], None],
    ) -> None:
        self._parts, self._reporter, self._rights = parts, reporter, rights
        self._change_config, self._restart = change_config, restart

    def add_to(self, router: web.UrlDispatcher, names: Sequence[str]) -> None:
        """Those of them that are named."""
        table: dict[str, Handler] = {
            "GET /v1/status": self.status,
            "GET /v1/models": self.models,
            "GET /v1/models/{name}": self.model,
            "GET /v1/models/{name}/experts": self.experts,
            "POST /v1/models": self.load,
            "DELETE /v1/models/{name}": self.unload,
            "POST /v1/restart": self.restart,
            "GET /v1/sessions": self.sessions,
            "PATCH /v1/sessions/{session_id}": self.change_session,
            "DELETE /v1/sessions/{session_id}": self.end_session,
            "GET /v1/topology": self.topology,
            "GET /v1/kernels": self.kernels,
            "GET /v1/config": self.config,
            "PATCH /v1/config": self.set_config,
            "POST /v1/config/reload": self.reload_config,
            "GET /v1/cache": self.cache,
            "POST /v1/cache/prune": self.prune_cache,
            "GET /v1/doctor": self.doctor,
            "GET /metrics": self.metrics,
        }
        for route in names:
            method, path = route.split()
            router.add_route(method, path, table[route])

    def _administrator(self, request: web.Request, what: str) -> Peer:
        peer = _peer(request)
        self._rights.require_administrator(peer, what)
        return peer

    def _body_limit(self) -> int:
        return self._parts.config.current().limits.control_body

    async def status(self, request: web.Request) -> web.Response:
        return json_answer(self._reporter.status())

    async def models(self, request: web.Request) -> web.Response:
        return json_answer(ModelsAnswer(boot_id=self._parts.boot, models=self._parts.registry.infos()))

    async def model(self, request: web.Request) -> web.Response:
        return json_answer(self._parts.registry.info_of(request.match_info["name"]))

    async def experts(self, request: web.Request) -> web.Response:
        registry, name = self._parts.registry, request.match_info["name"]
        return json_answer(await asyncio.to_thread(registry.experts, name, self._parts.boot))

    async def load(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, LoadRequest, self._body_limit())
        entry = self._parts.registry.load(wanted, self._rights.is_administrator(_peer(request)))
        return json_answer(self._parts.registry.info(entry), 202)

    async def unload(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self._administrator(request, "unload models")
        state = await self._parts.registry.unload(name, _flag(request, "force"))
        return json_answer(
            UnloadAnswer(boot_id=self._parts.boot, name=name, state=state.value if state else "unloaded")
        )

    async def restart(self, request: web.Request) -> web.Response:
        self._administrator(request, "restart the daemon")
        wanted = await read_body(request, RestartRequest, self._body_limit())
        self._restart(wanted.drain)
        return json_answer(RestartAnswer(boot_id=self._parts.boot, pid=os.getpid()), 202)

    async def sessions(self, request: web.Request) -> web.Response:
        return json_answer(SessionsAnswer(boot_id=self._parts.boot, sessions=self._parts.sessions.infos()))

    def _session(self, request: web.Request) -> Session:
        text = request.match_info["session_id"]
        if not text.isdecimal() or len(text) > 18:
            raise InvalidArgumentError(f"{text!r} is not a session's number")
        return self._parts.sessions.get(int(text))

    async def change_session(self, request: web.Request) -> web.Response:
        sessions, session, peer = self._parts.sessions, self._session(request), _peer(request)
        change = await read_body(request, SessionChange, self._body_limit())
        if change.priority is None and change.share is None:
            raise InvalidArgumentError("neither priority nor share is given", "syshaxctl sessions set ID --priority P")
        if session.peer.uid != peer.uid:
            self._rights.require_administrator(peer, "change other users' sessions")
        elif not sessions.only_lowers(session, change):
            self._rights.require_administrator(peer, "give a session a higher class or share")
        return json_answer(await sessions.change(session, change))

    async def end_session(self, request: web.Request) -> web.Response:
        session, peer = self._session(request), _peer(request)
        if session.peer.uid != peer.uid:
            self._rights.require_administrator(peer, "end other users' sessions")
        await self._parts.sessions.end(session, Closing.KICKED, f"ended over the control API by {peer}")
        return json_answer(SessionsAnswer(boot_id=self._parts.boot, sessions=self._parts.sessions.infos()))

    async def topology(self, request: web.Request) -> web.Response:
        return json_answer(self._reporter.topology())

    async def kernels(self, request: web.Request) -> web.Response:
        return json_answer(self._reporter.kernels())

    async def config(self, request: web.Request) -> web.Response:
        return json_answer(self._parts.config.answer(self._parts.boot))

    async def set_config(self, request: web.Request) -> web.Response:
        self._administrator(request, "change the configuration")
        wanted = await read_body(request, ConfigSetRequest, self._body_limit())
        config, boot = self._parts.config, self._parts.boot
        return json_answer(self._change_config(lambda: config.set(wanted.values, boot)))

    async def reload_config(self, request: web.Request) -> web.Response:
        self._administrator(request, "reload the configuration")
        config, boot = self._parts.config, self._parts.boot
        return json_answer(self._change_config(lambda: config.reload(boot)))

    async def cache(self, request: web.Request) -> web.Response:
        return json_answer(await asyncio.to_thread(self._parts.cache.answer, self._parts.boot))

    async def prune_cache(self, request: web.Request) -> web.Response:
        self._administrator(request, "remove packed models from the cache")
        wanted = await read_body(request, CachePruneRequest, self._body_limit())
        return json_answer(await asyncio.to_thread(self._parts.cache.prune, wanted, self._parts.boot))

    async def doctor(self, request: web.Request) -> web.Response:
        from syshaxd.doctor import run_checks, versions  # as metrics below: a start does without

        checks = await asyncio.to_thread(run_checks, self._parts, self._reporter)
        answer = DoctorAnswer(boot_id=self._parts.boot, checks=checks, versions=versions(self._parts))
        return json_answer(answer)

    async def metrics(self, request: web.Request) -> web.Response:
        from syshaxd.metrics import metrics_text

        body, content_type = metrics_text(self._parts, self._reporter)
        return web.Response(body=body, headers={"Content-Type": content_type})


def _peer(request: web.Request) -> Peer:
    """Who sent it. The transport is there as long as the request is handled."""
    transport = request.transport
    if transport is None:
        raise InvalidArgumentError("the client left")
    return peer_of(transport.get_extra_info("socket"))


def _flag(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "0")
    if value not in ("0", "1"):
        raise InvalidArgumentError(f"{name}={value}: expected 0 or 1")
    return value == "1"
