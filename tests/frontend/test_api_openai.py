"""The official client through the front-end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from aiohttp import web
from front_fixtures import Setup, cut_after, silent, streaming, until, write_keys


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


async def test_the_openai_client(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"

        worker.answer = streaming(chunk("Par"), chunk("is ☕"), b"data: [DONE]\n\n", pause=0.01)
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}], stream=True
        )
        assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "Paris ☕"

        async def whole(request: web.Request) -> web.Response:
            message = {"role": "assistant", "content": "Paris"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            return web.json_response(answer)

        worker.answer = whole
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        assert answer.choices[0].message.content == "Paris"

        with pytest.raises(openai.NotFoundError, match="Known models: `m`"):
            await client.chat.completions.create(model="x", messages=[])

        worker.answer = cut_after(chunk("Par"))
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        with pytest.raises(openai.APIError, match="failed while it answered"):
            _ = [part async for part in stream]


async def test_errors_arrive_as_the_clients_classes(setup: Setup, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", {"right": {}})
    worker = await setup.worker()
    front = await setup.front(worker, keys=tmp_path / "keys", limits={"body": 4096, "requests": 1})
    base = f"{front.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai.AsyncOpenAI(base_url=base, api_key="right", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="limit of 4096 bytes") as caught:
            await client.completions.create(model="m", prompt="x" * 10_000_000)
        assert caught.value.status_code == 413
        worker.answer = silent
        task = asyncio.create_task(client.completions.create(model="m", prompt="x"))
        await until(lambda: bool(worker.seen))
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="m", prompt="x")
        task.cancel()
        async with asyncio.timeout(1):
            await worker.cancelled.wait()


async def test_closing_a_stream_aborts_the_worker(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = streaming(chunk("a"), forever=True)
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        assert (await anext(aiter(stream))).choices[0].delta.content == "a"
        await stream.close()
        async with asyncio.timeout(1):
            await worker.cancelled.wait()
