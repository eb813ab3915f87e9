"""The storm's worker: a process of its own that answers like vLLM, with text that follows from the request alone.

Whoever knows the request knows the answer, so that a wrong, mixed-up or silently cut one is seen. Started from a
forkserver that has everything imported, so that a restart costs milliseconds; it may be killed or stopped at any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import zlib
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

MODEL = "m"
DONE = b"data: [DONE]\n\n"


def token(seed: int, number: int) -> str:
    """The text of one token; holds a character of three bytes, for streams that are cut within it."""
    return f"{zlib.crc32(f'{seed}:{number}'.encode()):08x}€"


def event(seed: int, number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": token(seed, number)}, "logprobs": None, "token_ids": [number]}
    body = {"id": f"chatcmpl-{seed}", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def whole(seed: int, tokens: int) -> bytes:
    """The answer that is no stream."""
    text = "".join(token(seed, number) for number in range(tokens))
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
    return json.dumps({"id": f"chatcmpl-{seed}", "model": MODEL, "choices": [choice]}, ensure_ascii=False).encode()


class Worker:
    """Its routes and how many requests it is answering."""

    def __init__(self) -> None:
        self.active = self.served = self.aborted = 0
        self.sick_until = 0.0

    async def health(self, request: web.Request) -> web.Response:
        """`?sick=S`: answers 503 for so many seconds from now on."""
        now = asyncio.get_running_loop().time()
        if "sick" in request.query:
            self.sick_until = now + float(request.query["sick"])
        return web.Response(status=503 if now < self.sick_until else 200)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response({"active": self.active, "served": self.served, "aborted": self.aborted})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.active += 1
        try:
            response = await (self._stream if body.get("stream") else self._whole)(request, body)
            self.served += 1
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.active -= 1

    async def _whole(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(body["pause"] * body["tokens"])
        return web.Response(body=whole(body["seed"], body["tokens"]), content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seed, cuts = body["seed"], random.Random(body["seed"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left = b""
        for number in range(body["tokens"]):
            await asyncio.sleep(body["pause"])
            data = left + event(seed, number)
            cut = cuts.choice((0, 0, 0, cuts.randrange(len(data))))  # one write in four ends within an event
            await response.write(data[: len(data) - cut])
            left = data[len(data) - cut :]
        await response.write(left + DONE)
        return response


def serve(port: int, told: Connection) -> None:
    """Serves on 127.0.0.1:`port` (0: any) until killed; sends the port when it listens."""

    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # clients that leave are no news

    async def run() -> None:
        worker, app = Worker(), web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", worker.health)
        app.router.add_get("/v1/models", worker.models)
        app.router.add_get("/stats", worker.stats)
        app.router.add_post("/v1/{route:.*}", worker.answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())
