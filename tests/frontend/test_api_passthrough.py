"""Bodies, streams and headers pass through byte for byte, over TCP and over a Unix socket."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web
from front_fixtures import FakeWorker, Front, Setup, error_of, streaming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["tcp", "unix"])
async def pair(request: pytest.FixtureRequest, setup: Setup) -> tuple[Front, FakeWorker]:
    worker = await setup.worker("m", at="unix" if request.param == "unix" else "http://127.0.0.1:0")
    return await setup.front(worker), worker


@few
@given(text=st.text(), numbers=st.lists(st.floats(allow_nan=False)), padding=st.text(" \n\t", max_size=5))
async def test_request_bodies_are_equal(
    pair: tuple[Front, FakeWorker], text: str, numbers: list[float], padding: str
) -> None:
    front, worker = pair
    body = (padding + json.dumps({"model": "m", "messages": [text], "x": numbers}) + padding).encode()
    async with front.session.post("/v1/chat/completions", data=body) as answer:
        assert await answer.read() == body
    assert worker.seen[-1].body == body


@few
@given(body=st.binary(max_size=4096), chunks=st.lists(st.binary(min_size=1, max_size=300), max_size=8))
async def test_any_bytes_on_other_routes_pass_both_ways(
    pair: tuple[Front, FakeWorker], body: bytes, chunks: list[bytes]
) -> None:
    front, worker = pair
    worker.answer = streaming(*chunks, kind="application/octet-stream")
    target = URL(f"{front.url}/v1/other/route?a=%2F&b=x%20y", encoded=True)
    async with front.session.post(target, data=body) as answer:
        assert await answer.read() == b"".join(chunks)
    assert worker.seen[-1].body == body
    assert worker.seen[-1].path == "/v1/other/route?a=%2F&b=x%20y"


@few
@given(text=st.text(min_size=1, max_size=60), cuts=st.lists(st.integers(0, 200), max_size=8))
async def test_streams_are_equal_wherever_they_are_cut(
    pair: tuple[Front, FakeWorker], text: str, cuts: list[int]
) -> None:
    front, worker = pair
    whole = f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode("utf-8", "replace")
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    worker.answer = streaming(*[whole[a:b] for a, b in pairwise(places)])
    async with await front.chat(stream=True) as answer:
        assert await answer.read() == whole


async def test_each_chunk_comes_as_it_is_sent(pair: tuple[Front, FakeWorker]) -> None:
    front, worker = pair
    euro = "€".encode()
    step = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in (euro[:1], euro[1:2], euro[2:]):
            await step.wait()
            step.clear()
            await response.write(piece)
        return response

    worker.answer = answer
    asyncio.get_running_loop().call_soon(step.set)
    async with await front.chat(stream=True) as response:
        for expected in (euro[:1], euro[1:2], euro[2:]):
            async with asyncio.timeout(1):
                assert await response.content.readany() == expected
            step.set()
        assert await response.content.readany() == b""


async def test_headers_pass_when_the_first_chunk_is_late(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"hold_seconds": 0.2})
    worker.answer = streaming(forever=True)
    async with asyncio.timeout(2):
        response = await front.chat(stream=True)
    assert response.status == 200 and response.content_type == "text/event-stream"
    response.close()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()


async def test_end_to_end_headers_pass_and_hop_by_hop_ones_do_not(pair: tuple[Front, FakeWorker]) -> None:
    front, worker = pair

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=b"{}", status=418, reason="Short And Stout")
        response.headers["X-Kept"] = "kept"
        response.headers.add("Set-Cookie", "a=1")
        response.headers.add("Set-Cookie", "b=2")
        response.headers["Keep-Alive"] = "timeout=5"
        response.headers["X-Private"] = "no"
        response.headers["Connection"] = "x-private"
        response.headers["Server"] = "uvicorn"
        return response

    worker.answer = answer
    sent = {
        "Authorization": "Bearer for-the-worker",
        "OpenAI-Organization": "org",
        "X-Umlaut": "grün",
        "Cookie": "c=3",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "Connection": "x-secret-hop",
        "X-Secret-Hop": "1",
        "TE": "trailers",
        "User-Agent": "me/1",
    }
    async with front.session.post("/v1/chat/completions", json={"model": "m"}, headers=sent) as response:
        assert (response.status, response.reason) == (418, "Short And Stout")
        assert response.headers["X-Kept"] == "kept" and response.headers["Server"] == "uvicorn"
        assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert "Keep-Alive" not in response.headers and "X-Private" not in response.headers
    got = {name.lower(): value for name, value in worker.seen[0].headers}
    for name in ("Authorization", "OpenAI-Organization", "X-Umlaut", "Cookie", "traceparent", "User-Agent"):
        assert got[name.lower()] == sent[name]
    assert "x-secret-hop" not in got and "te" not in got
    assert got["accept"] == "*/*" and got["accept-encoding"] == "gzip, deflate", "the client's own, unchanged"


async def test_nothing_is_added_but_the_request_id(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    names = sorted(name.lower() for name, _ in worker.seen[0].headers)
    assert names == ["content-length", "host", "x-request-id"]
    assert b"x-request-id: " in head.lower()


async def test_an_answer_keeps_what_it_has_and_our_own_answers_name_no_version(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    assert "aiohttp" in (await front.chat()).headers["Server"], "the worker's"
    for path in ("/health", "/v1/models", "/nope"):
        assert (await front.session.get(path)).headers["Server"] == "syshax-api"


async def test_a_request_id_is_kept(pair: tuple[Front, FakeWorker]) -> None:
    front, worker = pair
    async with front.session.post("/v1/completions", json={"model": "m"}, headers={"X-Request-Id": "mine"}) as answer:
        assert answer.headers.getall("x-request-id") == ["mine"]
    assert [value for name, value in worker.seen[0].headers if name.lower() == "x-request-id"] == ["mine"]


async def test_big_bodies_pass(pair: tuple[Front, FakeWorker]) -> None:
    front, worker = pair
    text = "x" * (20 << 20)
    worker.answer = streaming(*[bytes([i]) * (1 << 20) for i in range(20)], kind="application/octet-stream")
    async with await front.chat(prompt=text) as answer:
        digest = hashlib.sha256()
        async for chunk in answer.content.iter_any():
            digest.update(chunk)
    assert len(worker.seen[0].body) > 20 << 20 and json.loads(worker.seen[0].body)["prompt"] == text
    assert digest.digest() == hashlib.sha256(b"".join(bytes([i]) * (1 << 20) for i in range(20))).digest()


async def test_encoded_bodies_stay_encoded(pair: tuple[Front, FakeWorker]) -> None:
    front, worker = pair
    packed = gzip.compress(b'{"model": "m"}', mtime=0)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    worker.answer = answer
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with front.session.post("/v1/chat/completions", data=packed, headers=headers) as response:
        assert await response.read() == packed and response.headers["Content-Encoding"] == "gzip"
    assert worker.seen[0].body == packed


async def test_usage_and_stream_options_reach_the_worker_and_its_chunks_the_client(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}\n\n'
    worker.answer = streaming(b'data: {"choices":[{}],"usage":null}\n\n', usage, b"data: [DONE]\n\n")
    async with await front.chat(stream=True, stream_options={"include_usage": True}, max_completion_tokens=2) as answer:
        assert (await answer.read()).endswith(usage + b"data: [DONE]\n\n")
    sent = json.loads(worker.seen[0].body)
    assert sent["stream_options"] == {"include_usage": True} and sent["max_completion_tokens"] == 2


async def test_a_workers_own_error_passes_unchanged(pair: tuple[Front, FakeWorker]) -> None:
    front, worker = pair
    body = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=400, content_type="application/json")

    worker.answer = answer
    async with await front.chat() as response:
        assert response.status == 400 and await response.read() == body


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_other_methods_and_routes_pass(setup: Setup, method: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    async with front.session.request(method, "/v1/responses/abc?x=1") as response:
        assert response.status == 200
        await response.read()
    assert (worker.seen[0].method, worker.seen[0].path) == (method, "/v1/responses/abc?x=1")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"])
async def test_what_vllm_offers_beside_v1_passes_and_is_routed(setup: Setup, path: str) -> None:
    one, two = await setup.worker("a"), await setup.worker("b")
    front = await setup.front(one, two)
    async with front.session.post(path, json={"model": "b", "prompt": "x"}) as response:
        assert response.status == 200 and await response.json() == {"model": "b", "prompt": "x"}
    assert [seen.path for seen in two.seen] == [path] and not one.seen
    await error_of(await front.session.get(path), 405, "method_not_allowed")


async def test_a_multipart_form_is_routed_by_its_model(setup: Setup) -> None:
    one, two = await setup.worker("a"), await setup.worker("b")
    front = await setup.front(one, two)
    form = aiohttp.FormData({"model": "b", "language": "fr"})
    form.add_field("file", b"\x00\xff" * 100, filename="x.wav")
    async with front.session.post("/v1/audio/transcriptions", data=form) as response:
        assert response.status == 200
    assert not one.seen and len(two.seen) == 1


async def test_a_slow_reader_holds_the_worker_back(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(64):
            await response.write(b"x" * (1 << 20))
            sent += 1 << 20
        return response

    worker.answer = answer
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1 << 12)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(1)
    assert sent < 32 << 20, "the front-end must not take in what the client does not read"
    held = sent
    await asyncio.sleep(0.3)
    assert sent == held
    total = 0
    while total < 64 << 20:
        total += len(await reader.read(1 << 20))
    assert sent == 64 << 20
    writer.close()


async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = streaming(b"data: 1\n\n", b"data: 2\n\n")
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    answer = await reader.read()
    assert answer.endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n") and b"chunked" not in answer.lower()
    writer.close()


async def test_expect_100_continue(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, limits={"body": 2048})
    async with front.session.post("/v1/completions", json={"model": "m"}, expect100=True) as response:
        assert response.status == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4096\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 413"), "refused before the body is sent"
    writer.close()


async def test_a_header_that_is_not_utf8_is_refused_rather_than_changed(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Odd: \xff\xe9\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}'
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert not worker.seen


async def test_the_model_is_needed_when_workers_differ(setup: Setup) -> None:
    one, two = await setup.worker("a"), await setup.worker("b")
    front = await setup.front(one, two)
    error = await error_of(await front.chat(model=None), 400, "missing_required_parameter")
    assert error["param"] == "model" and "`a`" in error["message"] and "`b`" in error["message"]
