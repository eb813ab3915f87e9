"""Requests written to fool a front-end: two readings of one message, paths that climb, headers that inject.

Every case is bytes on a socket; what counts is what reached the worker and how many answers came back.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from front_fixtures import Front, Setup, silent, until

BODY = b'{"model":"m"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n"
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = b"Content-Length: 13\r\n"


async def exchange(front: Front, data: bytes) -> list[bytes]:
    """Sends `data`; the status lines of the answers within half a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(data)
    answer = b""
    try:
        async with asyncio.timeout(0.5):
            while part := await reader.read(1 << 16):
                answer += part
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]


REFUSED = {
    "both lengths": POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 13, 13\r\n\r\n" + BODY,
    "a signed length": POST + b"Content-Length: +13\r\n\r\n" + BODY,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length with an underscore": POST + b"Content-Length: 1_3\r\n\r\n" + BODY,
    "a length of 23 digits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY,
    "chunked that is not last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a coding before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a control before chunked": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n\r\nd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a folded header": POST + b"X-A: 1\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "lines that end in LF": (POST + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "a bare CR": POST + b"X-A: a\rX-B: b\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL": POST + b"X-A: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "a negative chunk": CHUNKED + b"-d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a hexadecimal prefix": CHUNKED + b"0xd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk that ends in LF": CHUNKED + b"d\n" + BODY + b"\n0\n\n",
    "a chunk of 68 bits": CHUNKED + b"fffffffffffffffff\r\n" + BODY,
    "no host": b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"\r\n" + BODY,
    "two hosts": POST + b"Host: i\r\n" + LENGTH + b"\r\n" + BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": POST.replace(b"HTTP/1.1", b"HTTP/1.2") + LENGTH + b"\r\n" + BODY,
    "a space in the path": b"GET /v1/a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "a control in the path": b"GET /v1/a\x01b HTTP/1.1\r\nHost: h\r\n\r\n",
    "bytes in the path": b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: h\r\n\r\n",
    "a header that is no text": POST + b"X-Request-Id: \xff\xfe\r\n" + LENGTH + b"\r\n" + BODY,
    "200 headers": POST + b"".join(b"X-%d: 1\r\n" % number for number in range(200)) + LENGTH + b"\r\n" + BODY,
    "another scheme": b"GET file:///etc/passwd HTTP/1.1\r\nHost: h\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_message_with_two_readings_is_refused_and_nothing_passes(setup: Setup, name: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    statuses = await exchange(front, REFUSED[name])
    assert len(statuses) == 1 and statuses[0][9:10] == b"4", statuses
    assert not worker.seen


@pytest.mark.parametrize("good", [0, 1, 0x20000])
@pytest.mark.parametrize("bad", [b"z\r\n", b"d\r\n" + BODY + b"x\r\n", b"-1\r\n"])
async def test_a_body_that_goes_wrong_in_the_middle_is_refused_at_once(
    setup: Setup, good: int, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """After so many good bytes, which alone may be a valid request; nothing of it passes."""
    worker = await setup.worker()
    front = await setup.front(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(CHUNKED + (b"%x\r\n" % good + b" " * good + b"\r\n" if good else b""))
    await until(lambda: bool(front.app.proxy.active))
    await until(lambda: good < 1 << 16 or front.app.board.cell("bytes of bodies").total() > 0)
    writer.write(bad + SMUGGLED)
    async with asyncio.timeout(5):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ") and b"HTTP/1.1" not in body
    assert json.loads(body)["error"]["message"].startswith("The request's body is broken: ")
    await until(lambda: not front.app.proxy.active)
    assert front.app.board.cell("bytes of bodies").total() == 0 and not worker.seen
    assert not [record for record in caplog.records if record.exc_info]


CLIMBING = ["/v1/..\\metrics", "/v1/..%2fmetrics", "/v1/..%5cmetrics", "/v1/%2e%2e/metrics", "/v1/a/%252e%252e/metrics"]


@pytest.mark.parametrize("path", [*CLIMBING, "http://other/v1/../metrics", "*", "/V1/x", "/v1x", "/.well-known/x"])
async def test_nothing_but_the_offered_paths_reaches_a_worker(setup: Setup, path: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    statuses = await exchange(front, f"OPTIONS {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    assert len(statuses) == 1 and statuses[0].startswith((b"HTTP/1.1 404", b"HTTP/1.0 400"))
    assert not worker.seen


@pytest.mark.parametrize("target", ["/v1/x", "/v1/chat/completions", "/health"])
async def test_nobody_makes_a_tunnel_to_a_worker(setup: Setup, target: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode() + SMUGGLED)
    async with asyncio.timeout(5):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 405 ") and b"\r\nAllow: " in head and b"*" not in head
    assert json.loads(body)["error"]["code"] == "method_not_allowed", "one answer, and the end"
    assert not worker.seen


@pytest.mark.parametrize("target", ["/v1/models", "/nope", "/health", "/v1/models/m"])
async def test_a_body_that_nobody_reads_is_not_the_next_request(setup: Setup, target: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    head = f"GET {target} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(SMUGGLED)}\r\n\r\n".encode()
    last = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    statuses = await exchange(front, head + SMUGGLED + last)
    assert 1 <= len(statuses) <= 2 and not worker.seen


async def test_a_refused_body_is_not_the_next_request(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, limits={"body": 1024})
    statuses = await exchange(front, POST + b"Content-Length: 4096\r\n\r\n" + SMUGGLED)
    assert statuses == [b"HTTP/1.1 413 Request Entity Too Large"] and not worker.seen


async def test_requests_in_one_packet_are_answered_in_order(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    bodies = [json.dumps({"model": "m", "n": number}).encode() for number in range(20)]
    writer.write(b"".join(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies))
    for body in bodies:
        async with asyncio.timeout(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(body)) == body
    writer.close()
    assert [seen.body for seen in worker.seen] == bodies


async def test_thousands_of_requests_in_one_packet_are_not_held_in_memory(setup: Setup) -> None:
    """Behind one that waits, the others are left in the socket."""
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = silent
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(POST + LENGTH + b"\r\n" + BODY + b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n" * 50_000)
    await until(lambda: bool(worker.seen))
    await asyncio.sleep(0.3)
    assert front.runner.server is not None
    assert all(len(connection._messages) < 100 for connection in front.runner.server.connections)
    assert (await front.session.get("/health")).status == 200
    writer.transport.abort()


async def test_trailers_and_hop_by_hop_headers_do_not_pass(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    trailers = b"d\r\n" + BODY + b"\r\n0\r\nAuthorization: Bearer trailer\r\n\r\n"
    assert (await exchange(front, CHUNKED + trailers))[0].startswith(b"HTTP/1.1 200")
    upgrade = b"Connection: upgrade, x-hop\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\nX-Hop: 1\r\n"
    assert (await exchange(front, POST + upgrade + LENGTH + b"\r\n" + BODY))[0].startswith(b"HTTP/1.1 200")
    for seen in worker.seen:
        assert not {name.lower() for name, _ in seen.headers} & {"authorization", "upgrade", "connection", "x-hop"}
        assert seen.body == BODY


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "a", "model": "b"}', "b"),
        (b'{"model": "b", "mod\\u0065l": "a"}', "a"),
        (b'{"x": {"model": "a"}, "model": "b"}', "b"),
        (b'{"MODEL": "a", "model": "b"}', "b"),
        ('{"model": "b"}'.encode("utf-16"), "b"),
        (b'\xef\xbb\xbf{"model": "b"}', "b"),
    ],
)
async def test_the_model_is_read_as_the_worker_reads_it(setup: Setup, body: bytes, model: str) -> None:
    """Python's json decides, which is the worker's: of two keys the last counts. Else a key's list would not bind."""
    assert json.loads(body)["model"] == model
    workers = {name: await setup.worker(name) for name in ("a", "b")}
    front = await setup.front(*workers.values())
    async with front.session.post("/v1/chat/completions", data=body) as response:
        assert response.status == 200, await response.read()
    assert [len(workers[name].seen) for name in (model, *({"a", "b"} - {model}))] == [1, 0]
