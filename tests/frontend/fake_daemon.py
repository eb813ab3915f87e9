"""The daemon's view socket without a daemon: whatever sessions, nodes and counts of experts the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from syshax.protocol import (
    ExpertsAnswer,
    ModelInfo,
    ModelsAnswer,
    ModelState,
    NodeInfo,
    Priority,
    SessionInfo,
    SessionsAnswer,
    StatusAnswer,
)

BOOT = "0" * 32


def session(address: str, number: int = 1, **changes: Any) -> SessionInfo:
    fields: dict[str, Any] = {
        "session_id": number, "model": "m", "client": "vllm", "address": address, "pid": 1, "uid": 1,
        "priority": Priority.NORMAL, "attached_seconds": 1.0, "max_tokens": 64, "num_slots": 1, "shm_bytes": 4096,
        "requests": 0, "tokens": 0, "errors": 0, "in_flight": 0, "queued_ms_total": 0.0, "compute_ms_total": 0.0,
        "last_active_seconds": 0.0,
    }  # fmt: skip
    return SessionInfo(**{**fields, **changes})


class FakeDaemon:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: list[SessionInfo] = []
        self.models = [ModelInfo(name="m", path="/m", format="q4_0", state=ModelState.READY)]
        self.tokens = [[0, 0, 0, 0] for _ in range(3)]
        self.busy = 0.25
        self.nonsense = False
        self.silent = False
        self.asked: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/sessions", self._sessions)
        app.router.add_get("/v1/status", self._status)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}/experts", self._experts)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            self.path.unlink(missing_ok=True)

    def _answer(self, request: web.Request, message: Any) -> web.Response:
        self.asked.append(request.path)
        if self.nonsense:
            return web.Response(text='{"what": "else"}')
        return web.Response(text=message.model_dump_json(), content_type="application/json")

    async def _sessions(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.Event().wait()
        return self._answer(request, SessionsAnswer(boot_id=BOOT, sessions=self.sessions))

    async def _models(self, request: web.Request) -> web.Response:
        return self._answer(request, ModelsAnswer(boot_id=BOOT, models=self.models))

    async def _experts(self, request: web.Request) -> web.Response:
        layers, experts = len(self.tokens), len(self.tokens[0])
        answer = ExpertsAnswer(
            boot_id=BOOT,
            name=request.match_info["name"],
            layers=layers,
            experts=experts,
            layer_ids=[2 * layer + 1 for layer in range(layers)],
            tokens=self.tokens,
            expert_bytes=1 << 20,
        )
        return self._answer(request, answer)

    async def _status(self, request: web.Request) -> web.Response:
        node = NodeInfo(
            node=0, cpus=[0, 1], threads=2, share=1.0, memory_bytes=1 << 34, free_bytes=1 << 33, pool_bytes=12 << 20,
            busy_fraction=self.busy,
        )  # fmt: skip
        status = StatusAnswer(
            version="0", boot_id=BOOT, pid=1, state="ready", uptime_seconds=61.0, cpu="CPU", isa="avx2",
            isa_best="avx2",
            nodes=[node], models=self.models, sessions=len(self.sessions), requests_completed=1, requests_failed=0,
            tokens=1, compute_seconds=1.0, pool_bytes=12 << 20, memory_limit_bytes=1 << 34,
        )  # fmt: skip
        return self._answer(request, status)
