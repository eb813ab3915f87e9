"""What other front-ends were seen to get wrong, one test a fault; tests/GUARDS.md lists these and the others."""

from __future__ import annotations

import asyncio
import json
import re
import time

import aiohttp
import pytest
from aiohttp import web
from front_fixtures import Setup, error_of, silent, until, write_keys

from syshaxd.frontend.app import PAGES, ROUTES

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def streaming_usage(asked: bytes) -> list[bytes]:
    """What vLLM sends for `stream_options.include_usage`: null in every chunk, then one chunk without choices."""
    assert json.loads(asked)["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null}],"usage":null}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}\n\n'
    return [chunk, usage, b"data: [DONE]\n\n"]


async def test_a_gap_of_the_answer_is_no_gap_in_watching_the_client(setup: Setup) -> None:
    """Seen: a client that leaves between two events is noticed at the next event alone."""
    worker = await setup.worker()
    front = await setup.front(worker)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        await asyncio.sleep(30)
        await response.write(EVENT)
        return response

    worker.answer = answer
    response = await front.chat(stream=True)
    assert await response.content.readany() == EVENT
    await asyncio.sleep(0.5)
    left = time.monotonic()
    response.close()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()
    assert time.monotonic() - left < 1
    await until(lambda: not front.app.proxy.active)


async def test_a_request_that_waits_for_its_whole_answer_is_aborted_when_its_client_leaves(setup: Setup) -> None:
    """Seen: the worker goes on computing an answer that nobody waits for."""
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = silent
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await front.chat(stream=False)
    async with asyncio.timeout(1):
        await worker.cancelled.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_and_token_ids_and_fields_nobody_knows_pass(setup: Setup, stream: bool) -> None:
    """Seen: answers parsed and written again, without the fields that the front-end did not know."""
    worker = await setup.worker()
    front = await setup.front(worker)
    logprobs = {"content": [{"token": "a", "logprob": -0.10000000000000001, "bytes": [97], "top_logprobs": []}]}
    choice = {"index": 0, "logprobs": logprobs, "token_ids": [5], "stop_reason": None, "x_unknown": {"": [1e999]}}
    choice |= {"delta" if stream else "message": {"role": "assistant", "content": "a", "reasoning": None}}
    whole = json.dumps({"choices": [choice], "prompt_token_ids": [1, 2], "kv_transfer_params": None}).encode()
    sent = b"data: " + whole + b"\n\ndata: [DONE]\n\n" if stream else whole

    async def answer(request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if stream else "application/json"
        return web.Response(body=sent, headers={"Content-Type": kind})

    worker.answer = answer
    asked = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True, "n": 2, "x_unknown": [None, {"": 1e-9}]}
    async with await front.chat(stream=stream, **asked) as response:
        assert await response.read() == sent
    assert json.loads(worker.seen[0].body) == {"model": "m", "messages": [], "stream": stream, **asked}


async def test_the_usage_chunk_of_a_stream_passes_as_the_worker_made_it(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in streaming_usage(await request.read()):
            await response.write(part)
        return response

    worker.answer = answer
    options = {"include_usage": True, "continuous_usage_stats": False}
    async with await front.chat(stream=True, stream_options=options) as response:
        assert await response.read() == b"".join(streaming_usage(worker.seen[0].body))


async def test_many_streams_all_start_at_once(setup: Setup) -> None:
    """Seen: hundreds of 2,000 streams waited in silence until others had ended (a pool of connections)."""
    streams = 600
    worker = await setup.worker()
    front = await setup.front(worker)
    begun, go = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal begun
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENT)
        begun += 1
        await go.wait()
        await response.write(EVENT)
        return response

    worker.answer = answer
    async with aiohttp.ClientSession(front.url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def stream() -> bytes:
            async with session.post("/v1/chat/completions", json={"model": "m", "stream": True}) as response:
                return await response.read()

        tasks = [asyncio.create_task(stream()) for _ in range(streams)]
        await until(lambda: begun == streams, 20)
        go.set()
        assert await asyncio.gather(*tasks) == [2 * EVENT] * streams
    await until(lambda: not front.app.proxy.active)


async def test_a_restarted_worker_is_used_again_within_a_second(setup: Setup) -> None:
    """Seen: 57 s, with growing pauses between checks. It was away for longer than several checks here."""
    worker = await setup.worker()
    front = await setup.front(worker, health={"interval_seconds": 2, "retry_seconds": 0.5, "timeout_seconds": 10})
    at = worker.url
    await worker.stop()
    assert (await front.chat()).status in (502, 503)
    await asyncio.sleep(3)
    await worker.start(at)
    back = time.monotonic()
    while (response := await front.chat()).status != 200:
        await error_of(response, 503, "not_ready")
        await asyncio.sleep(0.02)
    assert time.monotonic() - back < 1


async def test_every_route_of_every_table_is_closed_without_a_key(setup: Setup) -> None:
    """Seen: keys asked for by a path's prefix, and routes added later left open. The tables of routes are the list."""
    keys = write_keys(setup.folder / "keys", {"sk-right": {}})
    worker = await setup.worker("secret-name")
    front = await setup.front(worker, keys=keys)
    for path, methods in {**ROUTES, **PAGES}.items():
        for method in {*methods, "GET", "POST", "DELETE", "OPTIONS"} - {"*"}:
            response = await front.session.request(method, re.sub(r"\{\w+\}", "m", path))
            body = await response.read()
            if path in ("/health", "/ready"):
                assert response.status in (200, 405), (method, path)
                assert worker.url.encode() not in body and b'"secret-name"' not in body
            else:
                assert response.status == 401, (method, path, response.status)
    assert not worker.seen
