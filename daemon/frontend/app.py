"""The routes of syshax-api and who may use them. A request's path through the front-end starts at `App.handle`.

Everything that is not answered here goes to a worker in `proxy`. Own routes are one table, `ROUTES`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from syshaxd.frontend import metrics as metrics_module
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.console import EVENTS, Console, page
from syshaxd.frontend.errors import SERVER, ApiError, Kind, internal, quoted
from syshaxd.frontend.keys import Key, KeyRing
from syshaxd.frontend.metrics import Metrics
from syshaxd.frontend.openapi import describe
from syshaxd.frontend.proxy import Proxy
from syshaxd.frontend.request import OUTSIDE_V1, is_plain, path_of
from syshaxd.frontend.routing import Router
from syshaxd.frontend.workers import Workers

log = logging.getLogger("syshax.api")
Handler = Callable[["App", web.BaseRequest, Key | None], Awaitable[web.StreamResponse]]
"""The key that the request came with; None where no keys are asked for."""
OPEN_PATHS = frozenset(("/health", "/ready"))
"""The only paths that answer without a key; without one /ready keeps the names of workers and models to itself."""
OPERATORS_PATHS = frozenset(("/metrics", EVENTS))
"""They show every worker and model, so that keys for some models only are refused."""


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=json.dumps(value).encode(), content_type="application/json")


class App:
    """Keys, routes and errors; one object per process."""

    def __init__(self, config: ApiConfig, keys: KeyRing | None, board: Board | None = None) -> None:
        """`board`: the one that this front-end's processes share; None: this process is alone."""
        self.board = board = board or Board()
        self.keys = keys
        if keys is not None:
            keys.count_on(board)
        self.metrics = Metrics(board)
        self.workers = Workers(config, self.metrics, board)
        self.router = Router(config, self.workers, self.metrics, board)
        self.proxy = Proxy(config, self.router, self.metrics, board)
        self.console = Console(self.metrics, self.workers)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request; every error is an OpenAI error object."""
        try:
            response = await self._dispatch(request)
        except ApiError as error:
            response = error.response()
        except (ConnectionError, web.HTTPException):
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.raw_path)
            response = internal().response()
        if not response.prepared:
            response.headers["Server"] = SERVER
            if self.proxy.draining or request.method == "CONNECT":  # what follows is meant for a tunnel
                response.force_close()
        return response

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _ = path_of(request)
        key = None if self.keys is None else self.keys.find(request.headers.get("Authorization"))
        if (static := page(path, request.method, signed_in=self.keys is None or key is not None)) is not None:
            return static
        if key is None and self.keys is not None and path not in OPEN_PATHS:
            raise ApiError(
                Kind.NO_KEY,
                "A valid API key is needed: send it as `Authorization: Bearer KEY`.",
                headers=(("WWW-Authenticate", "Bearer"),),
            )
        if key is not None and key.models is not None and path in OPERATORS_PATHS:
            raise ApiError(Kind.FORBIDDEN, f"{path} shows all models; this key is for some of them only.")
        methods = ROUTES.get(path) or PAGES.get(path)
        if methods is None:
            if not path.startswith("/v1/") or not is_plain(path):
                raise ApiError(Kind.NO_ROUTE, f"There is no {request.method} {quoted(path)}.")
            methods = MODEL_ROUTE if path.startswith("/v1/models/") else ANY_ROUTE
        handler = methods.get("GET" if request.method == "HEAD" else request.method) or methods.get("*")
        if handler is None or request.method == "CONNECT":
            allowed = ", ".join(USUAL_METHODS if "*" in methods else methods)
            raise ApiError(
                Kind.METHOD, f"{quoted(path)} takes {allowed}, not {request.method}.", headers=(("Allow", allowed),)
            )
        return await handler(self, request, key)

    async def health(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """The process lives."""
        return _json({"status": "ok"})

    async def ready(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """200 when a worker is ready, else 503 with the reason."""
        reason = self.workers.unready_reason()
        details: dict[str, Any] = {}
        if self.keys is None or (key is not None and key.models is None):
            details["workers"] = [
                {
                    "worker": worker.url,
                    "name": worker.name,
                    "ready": worker.ready,
                    "reason": worker.reason,
                    "experts": worker.experts.state,
                    "models": list(worker.models),
                    "outstanding": worker.outstanding.total(),
                }
                for worker in self.workers.all
            ]
            details["daemon"] = self.workers.view.state
        if not reason:
            if self.keys is None or key is not None:
                details = {"models": list(self.router.models(key)), **details}
            return _json({"status": "ready", **details})
        error = json.loads(ApiError(Kind.NOT_READY, reason).body())
        return _json({"status": "not ready", "reason": reason, **error, **details}, 503)

    async def metrics_text(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """Prometheus metrics."""
        response = web.Response(body=self.metrics.render())
        response.headers["Content-Type"] = metrics_module.CONTENT_TYPE
        return response

    async def openapi(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """This description."""
        return _json(describe({**ROUTES, "/v1/models/{model}": MODEL_ROUTE}, OPEN_PATHS, App.forward))

    async def models(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """The models of all ready workers and the aliases, as far as the key may use them."""
        self._check_ready()
        return _json({"object": "list", "data": list(self.router.models(key).values())})

    async def model(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """One model by its id."""
        self._check_ready()
        name = unquote(path_of(request)[0].removeprefix("/v1/models/"))
        models = self.router.models(key)
        if name not in models:
            known = ", ".join(f"`{known}`" for known in models)
            raise ApiError(
                Kind.NO_MODEL, f"The model `{quoted(name)}` does not exist. Known models: {known}.", param="model"
            )
        return _json(models[name])

    async def forward(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """Passed to a worker."""
        return await self.proxy.forward(request, key)

    async def console_events(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """What the console shows, live."""
        return await self.console.events(request)

    def _check_ready(self) -> None:
        if reason := self.workers.unready_reason():
            raise ApiError(Kind.NOT_READY, f"{reason}.", headers=(("Retry-After", "1"),))


ROUTES: dict[str, dict[str, Handler]] = {
    "/health": {"GET": App.health},
    "/ready": {"GET": App.ready},
    "/metrics": {"GET": App.metrics_text},
    "/openapi.json": {"GET": App.openapi},
    "/v1/models": {"GET": App.models},
    "/v1/chat/completions": {"POST": App.forward},
    "/v1/completions": {"POST": App.forward},
    **{path: {"POST": App.forward} for path in sorted(OUTSIDE_V1)},
}
"""Path -> method -> handler."""
PAGES: dict[str, dict[str, Handler]] = {EVENTS: {"GET": App.console_events}}
"""What is there for people's browsers and no part of the API; the pages themselves are `console.page`'s."""
MODEL_ROUTE: dict[str, Handler] = {"GET": App.model}
"""/v1/models/NAME."""
ANY_ROUTE: dict[str, Handler] = {"*": App.forward}
"""Any other path under /v1/, with any method but CONNECT, which makes a tunnel of the connection."""
USUAL_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Those that CONNECT is told to be allowed there."""
