"""A front-end to look at: a real syshaxd with a small model, workers that really ask it for experts, and clients.

    make stage            # prints the console's address and goes on until it is interrupted

The workers are no vLLM: each streams words at a worker's pace and, for each token, has the daemon compute every layer,
with experts that are asked for unevenly, as real ones are. Everything else is what users run. PYTHONPATH must name
tests/frontend and tests/daemon, as `make stage` sees to.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from checkpoints import write_checkpoint
from front_fixtures import FakeWorker, Front, running_front

from syshax import Client
from syshax.control import Control
from syshax.errors import SyshaxError
from syshax.protocol import LoadRequest, ModelInfo, Priority, StatusAnswer

LAYERS, EXPERTS, HIDDEN, TOP_K = 24, 64, 256, 4
TOKEN_SECONDS = 0.035
CLIENTS = 5
CHOICES = 500
MODEL = "qwen3-30b-a3b"


class Daemon:
    """`syshaxd --user` in a directory of its own, with the model loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runtime_dir = folder, folder / "run"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = ["-m", "syshaxd", "--user", "--runtime-dir", self.runtime_dir, "--state-dir", self.folder / "state"]
        with (self.folder / "syshaxd.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(sys.executable, *map(str, command), stderr=log)
        control = Control(self.runtime_dir)
        for _ in range(600):
            with contextlib.suppress(SyshaxError):
                await asyncio.to_thread(control.get, "/v1/status", StatusAnswer)
                break
            await asyncio.sleep(0.05)
        if not (self.folder / "model").exists():
            write_checkpoint(
                self.folder / "model",
                num_hidden_layers=LAYERS,
                num_experts=EXPERTS,
                hidden_size=HIDDEN,
                moe_intermediate_size=192,
                num_experts_per_tok=TOP_K,
            )
        load = LoadRequest(name=MODEL, path=str(self.folder / "model"), format="q4_0")
        await asyncio.to_thread(control.post, "/v1/models", load, ModelInfo)
        for _ in range(600):
            if (await asyncio.to_thread(control.get, f"/v1/models/{MODEL}", ModelInfo)).state == "ready":
                return
            await asyncio.sleep(0.05)
        raise TimeoutError((self.folder / "syshaxd.log").read_text())

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


class Worker(FakeWorker):
    """Streams words; for each it has the daemon compute all layers."""

    def __init__(self, runtime_dir: Path, priority: Priority, seed: int) -> None:
        super().__init__(MODEL)
        self.answer = self._stream
        self._client, self._priority = Client(runtime_dir), priority
        self._random = np.random.default_rng(seed)
        popular = self._random.pareto(1.3, (LAYERS, EXPERTS)) + 0.25
        popular /= popular.sum(axis=1, keepdims=True)
        self._chosen = np.array(
            [[self._random.choice(EXPERTS, TOP_K, False, row) for _ in range(CHOICES)] for row in popular], np.int32
        )
        self._threads = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    async def attach(self) -> None:
        self._model = await asyncio.to_thread(
            self._client.open, MODEL, max_tokens=64, priority=self._priority, address=self.url
        )

    async def stop(self) -> None:
        await super().stop()
        with self._lock:
            self._client.close()
        self._threads.shutdown()

    def _compute(self, tokens: int) -> None:
        x = self._random.standard_normal((tokens, HIDDEN)).astype(np.float32)
        weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
        with self._lock, contextlib.suppress(SyshaxError):
            for layer, chosen in enumerate(self._chosen):
                self._model.moe(layer, x, chosen[self._random.integers(CHOICES, size=tokens)], weights)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._compute, 16)
        await asyncio.sleep(random.uniform(0.05, 0.4))
        generated = random.randint(30, 200)
        for _ in range(generated):
            await loop.run_in_executor(self._threads, self._compute, 1)
            await response.write(b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n')
            await asyncio.sleep(random.lognormvariate(0, 0.35) * TOKEN_SECONDS)
        usage = f'"usage":{{"prompt_tokens":{random.randint(100, 900)},"completion_tokens":{generated}}}'
        await response.write(f'data: {{"choices":[],{usage}}}\n\ndata: [DONE]\n\n'.encode())
        return response


async def ask_for_ever(front: Front, number: int) -> None:
    """One client: a stream, a pause, the next one."""
    while True:
        await asyncio.sleep(random.expovariate(1 / (1 + number / 4)))
        with contextlib.suppress(aiohttp.ClientError):
            body = {"model": MODEL, "messages": [{"role": "user", "content": str(number)}], "stream": True}
            async with front.session.post("/v1/chat/completions", json=body) as response:
                await response.read()


@asynccontextmanager
async def stage(folder: Path, keys: Path | None = None, clients: int = CLIENTS) -> AsyncIterator[Front]:
    """Everything running, until the block ends."""
    async with AsyncExitStack() as stack:
        daemon = Daemon(folder)
        stack.push_async_callback(daemon.stop)
        await daemon.start()
        workers = [
            Worker(daemon.runtime_dir, Priority.INTERACTIVE, 1),
            Worker(daemon.runtime_dir, Priority.NORMAL, 2),
            Worker(daemon.runtime_dir, Priority.BATCH, 2),
        ]
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
            await worker.attach()
        workers[2].healthy = False  # as one that is still starting
        batch = {"batch": {"workers": [workers[2].url], "priority": "batch"}}
        view = {"view_socket": str(daemon.runtime_dir / "view.sock")}
        front = await stack.enter_async_context(
            running_front(workers[0].url, workers[1].url, keys=keys, daemon=view, groups=batch)
        )
        await front.until_ready(2)
        tasks = [asyncio.create_task(ask_for_ever(front, number)) for number in range(clients)]
        try:
            yield front
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="syshax-stage") as folder:
        async with stage(Path(folder)) as front:
            print(f"{front.url}/console", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
