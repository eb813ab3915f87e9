"""A fake vLLM worker and a front-end before it, both real HTTP servers in the test's own loop."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tomli_w
from aiohttp import web

from syshaxd.frontend.app import App
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.connections import Connections
from syshaxd.frontend.keys import KeyRing

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


async def echo(request: web.Request) -> web.StreamResponse:
    """The body comes back as it went."""
    return web.Response(body=await request.read(), content_type="application/json")


class FakeWorker:
    """Answers as a vLLM server would, with `answer` in the place of the model."""

    def __init__(self, *models: str) -> None:
        self.models = list(models)
        self.answer: Answer = echo
        self.healthy = True
        self.key = ""
        """Where it is set /v1/ asks for it, as vLLM's --api-key does."""
        self.seen: list[Seen] = []
        self.cancelled = asyncio.Event()
        """Set when a client of this worker left before its answer was complete."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, at: str = "http://127.0.0.1:0") -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=0.1)
        await self._runner.setup()
        if at.startswith("unix:"):
            await web.UnixSite(self._runner, at.removeprefix("unix:")).start()
            self.url = at
        else:
            site = web.TCPSite(self._runner, "127.0.0.1", int(at.rsplit(":", 1)[1]))
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]})

    async def _any(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.method, request.raw_path, list(request.headers.items()), body))
        try:
            return await self.answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise


def streaming(*chunks: bytes, pause: float = 0.0, forever: bool = False, kind: str = "text/event-stream") -> Answer:
    """An answer of these chunks; `forever` goes on after them without a byte."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(pause)
        if forever:
            await asyncio.Event().wait()
        return response

    return answer


def cut_after(*chunks: bytes, kind: str = "text/event-stream") -> Answer:
    """An answer that breaks off after these chunks, as when the process dies."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        if chunks:
            await response.prepare(request)
            for chunk in chunks:
                await response.write(chunk)
                await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


async def silent(request: web.Request) -> web.StreamResponse:
    """Never a byte."""
    await asyncio.Event().wait()
    return web.Response()


class Front:
    """A running front-end and a client session at its address."""

    def __init__(self, app: App, runner: web.ServerRunner, session: aiohttp.ClientSession) -> None:
        self.app = app
        self.runner = runner
        self.session = session
        self.port: int = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def chat(self, model: str | None = "m", key: str | None = None, **fields: Any) -> aiohttp.ClientResponse:
        body = {"messages": [], **fields} if model is None else {"model": model, "messages": [], **fields}
        return await self.session.post("/v1/chat/completions", json=body, headers=bearer(key) if key else None)

    async def until_ready(self, count: int) -> None:
        await until(lambda: sum(worker.ready for worker in self.app.workers.all) >= count)

    def metric(self, name: str, **labels: str) -> float:
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for it; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is another task's state
            await asyncio.sleep(0.01)


async def error_of(response: aiohttp.ClientResponse, status: int, code: str) -> dict[str, Any]:
    """Checks that the answer is an OpenAI error object with this status and code; returns it."""
    body = json.loads(await response.read())
    assert response.status == status, body
    assert response.content_type == "application/json"
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code and error["message"] and error["type"]
    return dict(error)


def write_keys(path: Path, keys: Mapping[str, Mapping[str, Any]]) -> Path:
    """A keys file: key -> what it may do; the names are made up."""
    rows = {
        f"key{number}": {"sha256": hashlib.sha256(key.encode()).hexdigest(), **may}
        for number, (key, may) in enumerate(keys.items())
    }
    path.write_text(tomli_w.dumps({"keys": rows}))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


FAST = {"health": {"interval_seconds": 0.2, "retry_seconds": 0.05, "timeout_seconds": 0.5}}


@asynccontextmanager
async def running_front(
    *urls: str, keys: Path | None = None, board: Board | None = None, port: int = 0, **settings: Any
) -> AsyncIterator[Front]:
    config = ApiConfig.model_validate({"workers": list(urls), **FAST, **settings})
    app = App(config, KeyRing(keys) if keys else None, board)
    runner = web.ServerRunner(Connections(app, config), shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    app.workers.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(base, auto_decompress=False) as session:
            yield Front(app, runner, session)
    finally:
        await runner.cleanup()
        await app.workers.close()


@dataclass
class Setup:
    """Starts workers and front-ends that the test's end stops."""

    stack: AsyncExitStack
    folder: Path

    async def worker(self, *models: str, at: str = "http://127.0.0.1:0") -> FakeWorker:
        worker = FakeWorker(*(models or ("m",)))
        await worker.start(f"unix:{self.folder}/w.sock" if at == "unix" else at)
        self.stack.push_async_callback(worker.stop)
        return worker

    async def front(self, *workers: FakeWorker | str, keys: Path | None = None, **settings: Any) -> Front:
        urls = [worker if isinstance(worker, str) else worker.url for worker in workers]
        front = await self.stack.enter_async_context(running_front(*urls, keys=keys, **settings))
        await front.until_ready(sum(isinstance(worker, FakeWorker) for worker in workers))
        return front


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        yield Setup(stack, tmp_path)
