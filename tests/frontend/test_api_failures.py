"""Clients that leave, workers that fail, limits: each ends in an abort, another worker or an OpenAI error."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from front_fixtures import FakeWorker, Setup, cut_after, error_of, silent, streaming, until

from syshaxd.frontend.relay import Relay

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", ["unix", "http://127.0.0.1:0"])
async def test_a_client_that_leaves_before_the_first_byte_aborts_within_a_second(
    setup: Setup, stream: bool, at: str
) -> None:
    worker = await setup.worker(at=at)
    front = await setup.front(worker)
    worker.answer = silent
    request = asyncio.create_task(front.chat(stream=stream))
    await until(lambda: bool(worker.seen))
    start = time.monotonic()
    request.cancel()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()
    assert time.monotonic() - start < 1
    await until(lambda: not front.app.proxy.active)
    assert front.metric("syshax_api_client_disconnects_total") == 1
    assert front.metric("vllm:num_requests_running", model_name="m", worker=worker.url, priority="normal") == 0


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_a_client_that_leaves_in_a_gap_of_the_answer_aborts_within_a_second(setup: Setup, kind: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = streaming(EVENT, forever=True, kind=kind)
    response = await front.chat(stream=True)
    assert await response.content.readany() == EVENT
    response.close()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()


async def test_a_client_that_resets_its_connection_aborts_too(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = silent
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    await until(lambda: bool(worker.seen))
    writer.transport.abort()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()


@pytest.mark.parametrize("chunks", [(), (b"",)])
async def test_a_worker_that_fails_before_its_first_byte_is_replaced_once(
    setup: Setup, chunks: tuple[bytes, ...]
) -> None:
    bad, good = await setup.worker(), await setup.worker()
    front = await setup.front(bad, good)
    bad.answer = cut_after(*chunks)
    for _ in range(4):
        async with await front.chat(stream=True) as response:
            assert response.status == 200 and b"messages" in await response.read()
    assert len(bad.seen) >= 1 and len(good.seen) == 4
    assert front.metric("syshax_api_retries_total", worker=bad.url) == len(bad.seen)
    assert good.seen[0].body == bad.seen[0].body


async def test_two_failing_workers_give_502_after_one_retry(setup: Setup) -> None:
    workers = [await setup.worker() for _ in range(3)]
    front = await setup.front(*workers)
    for worker in workers:
        worker.answer = cut_after()
    error = await error_of(await front.chat(), 502, "worker_failed")
    assert "127.0.0.1" not in error["message"]
    assert sum(len(worker.seen) for worker in workers) == 2


async def test_a_request_that_may_not_be_repeated_is_not(setup: Setup) -> None:
    workers = [await setup.worker() for _ in range(2)]
    front = await setup.front(*workers)
    for worker in workers:
        worker.answer = cut_after()
    await error_of(await front.session.post("/v1/responses", json={"model": "m"}), 502, "worker_failed")
    assert sum(len(worker.seen) for worker in workers) == 1


async def test_a_worker_that_is_gone_loses_no_request_and_is_used_again_within_a_second(setup: Setup) -> None:
    one, two = await setup.worker(), await setup.worker()
    front = await setup.front(one, two, health={"interval_seconds": 30, "retry_seconds": 0.1})
    port = one.url
    await one.stop()
    for _ in range(6):
        async with await front.chat() as response:
            assert response.status == 200
    assert len(two.seen) == 6
    await one.start(port)
    start = time.monotonic()
    await front.until_ready(2)
    assert time.monotonic() - start < 1
    for _ in range(4):
        await (await front.chat()).read()
    assert one.seen


@pytest.mark.parametrize("sent", [EVENT, EVENT + b'data: {"cho', b"data: 1\r\n\r\n"])
async def test_a_stream_that_breaks_ends_with_an_error_event(setup: Setup, sent: bytes) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = cut_after(sent)
    async with await front.chat(stream=True) as response:
        body = await response.read()
    assert body.startswith(sent)
    added = body[len(sent) :]
    assert added.startswith(b"data: " if sent.endswith(b"\n\n") or sent.endswith(b"\r\n\r\n") else b"\n\ndata: ")
    event = json.loads(added.strip().removeprefix(b"data: "))
    assert event["error"]["code"] == "worker_failed" and added.endswith(b"\n\n")
    assert len(worker.seen) == 1, "never sent again after the first byte"
    assert (
        front.metric("syshax_api_requests_total", model_name="m", priority="normal", worker=worker.url, status="502")
        == 1
    )


async def test_an_answer_that_is_no_stream_breaks_off_visibly(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = cut_after(b'{"half":', kind="application/json")
    response = await front.chat()
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()


async def test_the_connection_stays_after_an_error_event(setup: Setup) -> None:
    """Closing it would lose the request that a client sends as soon as it has read the event."""
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = cut_after(EVENT)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    async with asyncio.timeout(5):
        for _ in range(3):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert b" 200 OK" in answer and b'"worker_failed"' in answer
    writer.close()


@pytest.mark.parametrize("at", ["tcp", "unix"])
async def test_no_text_names_a_workers_address(setup: Setup, tmp_path: Path, at: str) -> None:
    """Refused, reset, gone while it answered: neither the error nor /ready's reason holds address, port or path."""
    worker = await setup.worker(at="unix" if at == "unix" else "http://127.0.0.1:0")
    front = await setup.front(worker, health={"interval_seconds": 30, "retry_seconds": 30})
    address = worker.url.removeprefix("unix:").removeprefix("http://")
    secret = [address, *address.split(":"), "w.sock"]
    texts = []
    worker.answer = cut_after()
    texts.append(await error_of(await front.chat(), 502, "worker_failed"))
    worker.answer = cut_after(EVENT)
    async with await front.chat(stream=True) as response:
        texts.append(json.loads((await response.read()).rsplit(b"data: ", 1)[1])["error"])
    await worker.stop()
    gone = [await front.chat(), await front.chat()]  # the first may find it gone, the second knows
    assert gone[0].status in (502, 503) and gone[1].status == 503
    texts += [(await response.json())["error"] for response in gone]
    for error in texts:
        assert not any(word in str(error) for word in secret), error


async def test_timeouts(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"first_byte_seconds": 0.3, "idle_seconds": 0.4})
    worker.answer = silent
    error = await error_of(await front.chat(), 504, "worker_timeout")
    assert "0.3 s" in error["message"] and len(worker.seen) == 1
    async with asyncio.timeout(1):
        await worker.cancelled.wait()
    worker.answer = streaming(*[EVENT] * 4, pause=0.3, forever=True)
    async with await front.chat(stream=True) as response:
        body = await response.read()
    assert body.startswith(EVENT * 4) and b'"worker_timeout"' in body


async def test_a_body_that_does_not_arrive(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"first_byte_seconds": 0.3})
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()
    await until(lambda: not front.app.proxy.active)
    assert not worker.seen


async def test_no_worker_no_readiness_and_it_heals_by_itself(setup: Setup, tmp_path: Path) -> None:
    path = tmp_path / "late.sock"
    front = await setup.front(f"unix:{path}")
    assert (await front.session.get("/health")).status == 200
    async with front.session.get("/ready") as response:
        body = await response.json()
        assert response.status == 503 and "no such file" in body["reason"]
        assert body["error"]["code"] == "not_ready" and body["workers"][0]["ready"] is False
    for answer in (await front.chat(), await front.session.get("/v1/models"), await front.session.get("/v1/models/m")):
        assert answer.headers["Retry-After"] == "1"
        error = await error_of(answer, 503, "not_ready")
        assert str(path) not in error["message"]
    worker = FakeWorker("m")
    await worker.start(f"unix:{path}")
    await front.until_ready(1)
    assert (await (await front.session.get("/ready")).json())["models"] == ["m"]
    assert (await front.chat()).status == 200
    worker.healthy = False
    await until(lambda: not front.app.workers.all[0].ready)
    assert "/health answers 503" in (await (await front.session.get("/ready")).json())["reason"]
    worker.healthy = True
    await front.until_ready(1)
    await worker.stop()


async def test_a_frozen_worker_stops_being_ready(setup: Setup) -> None:
    gate = asyncio.Event()
    gate.set()
    worker = await setup.worker()
    front = await setup.front(worker)

    async def stuck(request: web.Request) -> web.Response:
        await gate.wait()
        return web.Response()

    worker._health = stuck  # type: ignore[method-assign]
    await worker.stop()
    await worker.start(worker.url)
    await front.until_ready(1)
    gate.clear()
    await until(lambda: not front.app.workers.all[0].ready)
    assert front.app.workers.all[0].reason == "no answer in 0.5 s"
    gate.set()
    await front.until_ready(1)


async def test_something_that_is_no_worker(setup: Setup) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    front = await setup.front(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await until(lambda: "HTTP" in front.app.workers.all[0].reason)
    server.close()


async def test_models_are_merged_and_requests_go_where_they_are_served(setup: Setup) -> None:
    one, two = await setup.worker("a", "both"), await setup.worker("b/c", "both")
    front = await setup.front(one, two)
    listed = await (await front.session.get("/v1/models")).json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["a", "both", "b/c"]
    assert (await (await front.session.get("/v1/models/b/c")).json())["id"] == "b/c"
    for _ in range(3):
        await (await front.chat("a")).read()
    await (await front.chat("b/c")).read()
    assert (len(one.seen), len(two.seen)) == (3, 1)
    error = await error_of(await front.chat("nope"), 404, "model_not_found")
    assert error["param"] == "model" and all(f"`{name}`" in error["message"] for name in ("nope", "a", "b/c"))
    await error_of(await front.session.get("/v1/models/nope"), 404, "model_not_found")
    await two.stop()
    await until(lambda: not front.app.workers.all[1].ready)
    await error_of(await front.chat("b/c"), 503, "not_ready")
    assert (await front.chat("both")).status == 200


async def test_the_least_loaded_worker_gets_the_request(setup: Setup) -> None:
    one, two = await setup.worker(), await setup.worker()
    front = await setup.front(one, two)
    one.answer = two.answer = silent
    tasks = [asyncio.create_task(front.chat()) for _ in range(10)]
    await until(lambda: len(one.seen) + len(two.seen) == 10)
    assert (len(one.seen), len(two.seen)) == (5, 5)
    two.answer = streaming(b"x")
    two.cancelled.clear()
    for task in tasks:
        task.cancel()
    await until(lambda: not front.app.proxy.active)


async def test_body_limit(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, limits={"body": 4096})
    fits = json.dumps({"model": "m", "p": ""}).encode()
    fits = json.dumps({"model": "m", "p": "x" * (4096 - len(fits))}).encode()
    assert len(fits) == 4096
    assert (await front.session.post("/v1/completions", data=fits)).status == 200
    error = await error_of(await front.session.post("/v1/completions", data=fits + b" "), 413, "request_too_large")
    assert "4096 bytes" in error["message"]

    async def parts() -> asyncio.AsyncIterator[bytes]:  # type: ignore[name-defined]
        for _ in range(100):
            yield b"x" * 1000

    await error_of(await front.session.post("/v1/completions", data=parts()), 413, "request_too_large")
    await error_of(await front.session.post("/v1/completions", data=b"x" * (8 << 20)), 413, "request_too_large")
    assert len(worker.seen) == 1


async def test_the_default_limit_lets_long_prompts_pass(setup: Setup) -> None:
    front = await setup.front(await setup.worker())
    async with await front.chat(p="x" * ((64 << 20) - 100)) as response:
        assert response.status == 200
        await response.read()
    await error_of(await front.chat(p="x" * (64 << 20)), 413, "request_too_large")


async def test_too_many_requests(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, limits={"requests": 3})
    worker.answer = silent
    tasks = [asyncio.create_task(front.chat()) for _ in range(3)]
    await until(lambda: len(worker.seen) == 3)
    response = await front.chat()
    assert response.headers["Retry-After"] == "1"
    assert (await error_of(response, 429, "overloaded"))["type"] == "rate_limit_error"
    tasks.pop().cancel()
    await until(lambda: len(front.app.proxy.active) == 2)
    worker.answer = streaming(b"x")
    assert (await front.chat()).status == 200
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": "m"', b"\xff\xfe", b"[" * 200_000, b'{"model": "m"} x', b"nul"]
)
async def test_malformed_json(setup: Setup, body: bytes) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    for path in ("/v1/chat/completions", "/v1/completions"):
        await error_of(await front.session.post(path, data=body), 400, "invalid_json")
    if body:
        headers = {"Content-Type": "application/json"}
        await error_of(await front.session.post("/v1/embeddings", data=body, headers=headers), 400, "invalid_json")
    assert not worker.seen


@pytest.mark.parametrize("body", [b"[1]", b"null", b'"m"', b'{"model": 5}', b'{"model": "\\ud800", "model": "m"}'])
async def test_odd_but_valid_json_is_the_workers_business(setup: Setup, body: bytes) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    assert (await front.session.post("/v1/chat/completions", data=body)).status == 200
    assert worker.seen[0].body == body


@pytest.mark.parametrize(
    "path", ["/", "/v2/models", "/v1", "/metrics/", "//v1/models", "/v1/../metrics", "/v1/%2e%2e/x", "/v1/%252e./x"]
)
async def test_unknown_routes(setup: Setup, path: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert not worker.seen


async def test_wrong_methods(setup: Setup) -> None:
    front = await setup.front(await setup.worker())
    for method, path, allowed in [
        ("POST", "/health", "GET"),
        ("DELETE", "/v1/models", "GET"),
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/models/m", "GET"),
    ]:
        response = await front.session.request(method, path)
        assert response.headers["Allow"] == allowed
        await error_of(response, 405, "method_not_allowed")


@pytest.mark.parametrize(
    "text",
    [b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", b"\x16\x03\x01\x02"],
)
async def test_malformed_http(setup: Setup, text: bytes) -> None:
    front = await setup.front(await setup.worker())
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(text)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert json.loads(body)["error"]["code"] == "bad_request"
    assert (await front.session.get("/health")).status == 200


async def test_metrics(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = streaming(EVENT, EVENT, EVENT, pause=0.02)
    async with await front.chat(stream=True) as response:
        await response.read()
    await error_of(await front.chat("n" * 1000), 404, "model_not_found")
    labels = {"model_name": "m", "worker": worker.url, "priority": "normal"}
    assert front.metric("syshax_api_requests_total", **labels, status="200") == 1
    assert front.metric("vllm:time_to_first_token_seconds_count", **labels) == 1
    assert front.metric("vllm:inter_token_latency_seconds_count", **labels) == 2
    assert 0.02 <= front.metric("vllm:inter_token_latency_seconds_sum", **labels) < 1
    assert front.metric("syshax_api_response_bytes_total", **labels) == 3 * len(EVENT)
    assert front.metric("syshax_api_request_bytes_total", **labels) == len(worker.seen[0].body)
    assert front.metric("vllm:e2e_request_latency_seconds_count", **labels) == 1
    async with front.session.get("/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain")
    assert f'syshax_api_worker_ready{{worker="{worker.url}"}} 1.0' in text
    assert "nnnn" not in text, "clients cannot add series"


async def test_no_descriptor_stays_open(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = silent

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    await until(lambda: front.app.workers.all[0].ready)
    before = open_files()
    for _ in range(5):
        tasks = [asyncio.create_task(front.chat()) for _ in range(10)]
        await until(lambda: len(front.app.proxy.active) == 10)
        for task in tasks:
            task.cancel()
        await until(lambda: not front.app.proxy.active)
    await until(lambda: open_files() <= before + 4)


async def test_an_internal_error_counts_as_what_the_client_gets(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before an answer has begun, and within a stream, which ends with an error event."""
    worker = await setup.worker()
    worker.answer = streaming(EVENT)
    front = await setup.front(worker)
    caplog.set_level("INFO", "syshax.api")

    def fault(*_: object) -> bytes:
        raise RuntimeError("a fault of ours")

    async def run(relay: Relay) -> None:
        await relay.response.prepare(relay._request)
        await relay.response.write(EVENT)
        fault()

    with monkeypatch.context() as patch:
        patch.setattr(front.app.router, "bytes_for", fault)
        await error_of(await front.chat(), 500, "internal_error")
    monkeypatch.setattr(Relay, "run", run)
    async with await front.chat(stream=True) as response:
        body = await response.read()
    assert body.startswith(EVENT + b"data: ")
    assert json.loads(body.removeprefix(EVENT + b"data: "))["error"]["code"] == "internal_error"
    await until(lambda: not front.app.proxy.active)
    labels = {"model_name": "m", "worker": worker.url, "priority": "normal", "status": "500"}
    assert front.metric("syshax_api_requests_total", **labels) == 2
    assert front.metric("syshax_api_client_disconnects_total") == 0
    told = [record for record in caplog.records if record.msg == "request"]
    assert [(record.status, record.note) for record in told] == [(500, "an internal error")] * 2  # type: ignore[attr-defined]
