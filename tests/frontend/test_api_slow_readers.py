"""Clients that are slow or too many: they hold little memory, are cut off in time, and are told why."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from api_program import api
from front_fixtures import Setup, silent, streaming, until

from syshaxd.bench import api_wire, api_worker
from syshaxd.bench.api_load import resident_bytes

EVENT = b"data: 1\n\n"
READERS = 100
MOST_PER_READER = (256 + 256 + 30) << 10
"""What the transport takes before it says stop, one read, and the objects of a stream."""


class Reader(asyncio.Protocol):
    """Asks for a stream at full speed, and reads its head and no more until it is told to."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.bytes = 0
        self.last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(api_wire.request(stream=True, gap_ms=0))

    def data_received(self, data: bytes) -> None:
        if not self.bytes:
            assert data.startswith(b"HTTP/1.1 200 OK")
            self.transport.pause_reading()
        self.bytes += len(data)
        self.last = data[-200:]


@pytest.fixture
async def flood() -> AsyncIterator[str]:
    """The address of a worker that sends as fast as it is read."""
    server = await api_worker.serve()
    yield f"http://127.0.0.1:{api_worker.port_of(server)}"
    await api_worker.close(server)


async def test_a_hundred_clients_that_do_not_read_hold_little_memory(flood: str) -> None:
    loop = asyncio.get_running_loop()
    async with api("--port", "0", "--worker", flood) as server, aiohttp.ClientSession() as session:
        await server.ready()
        port, pids = int(server.url.rsplit(":", 1)[1]), [server.process.pid]
        before = resident_bytes(pids)
        readers = [(await loop.create_connection(Reader, "127.0.0.1", port))[1] for _ in range(READERS)]
        await until(lambda: all(reader.bytes for reader in readers), 30)
        sizes = [resident_bytes(pids)]
        while len(sizes) < 4 or sizes[-1] > sizes[-4] + (1 << 20):
            await asyncio.sleep(0.3)
            sizes.append(resident_bytes(pids))
        assert sizes[-1] - before < READERS * MOST_PER_READER + (16 << 20)
        question = {"model": api_wire.MODEL, "messages": []}
        async with asyncio.timeout(5), session.post(f"{server.url}/v1/chat/completions", json=question) as answer:
            assert answer.status == 200, "others are served meanwhile"
        got = [reader.bytes for reader in readers]
        for reader in readers[:3]:
            reader.transport.resume_reading()
        await until(lambda: all(now.bytes > then + (1 << 20) for now, then in zip(readers[:3], got, strict=False)), 20)
        for reader in readers:
            reader.transport.abort()
        await until(lambda: server.log.count("status=499") == READERS, 10)


async def test_what_a_slow_reader_gets_is_what_was_sent(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    chunks = [bytes([65 + i % 26]) * 5000 for i in range(2000)]
    worker.answer = streaming(*chunks)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1 << 12)
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.5)
    (exchange,) = front.app.proxy.active
    assert exchange.relay is not None and exchange.relay.full
    held = exchange.relay.bytes_out
    await asyncio.sleep(0.2)
    assert exchange.relay.bytes_out == held < len(b"".join(chunks)), "the worker is held up"
    assert await reader.read() == b"".join(chunks)
    writer.close()


async def test_a_client_that_reads_nothing_is_cut_off(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"idle_seconds": 0.5})
    worker.answer = streaming(*[EVENT * 4000] * 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1 << 12)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    await until(lambda: any(exchange.relay and exchange.relay.full for exchange in front.app.proxy.active))
    await until(lambda: not front.app.proxy.active, 3)
    async with asyncio.timeout(1):
        await worker.cancelled.wait()
    assert b'"client_too_slow"' in (await reader.read())[-300:]
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_it_does_not_read(setup: Setup, stream: bool) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = streaming(*[EVENT * 4000] * 1000, kind="text/event-stream" if stream else "application/json")
    _, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1 << 12)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    await until(lambda: any(exchange.relay and exchange.relay.full for exchange in front.app.proxy.active))
    writer.transport.abort()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()
    await until(lambda: not front.app.proxy.active, 1)


@pytest.mark.parametrize("waiting", [True, False])
async def test_a_hundred_that_leave_are_noticed_within_a_second(setup: Setup, waiting: bool) -> None:
    """Waiting without a byte, or in a gap of their streams."""
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = silent if waiting else streaming(EVENT, forever=True)
    clients = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(100)]
    for _, writer in clients:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
    await until(lambda: len(worker.seen) == 100)
    start = time.monotonic()
    for _, writer in clients:
        writer.close()
    await until(lambda: not front.app.proxy.active)
    assert time.monotonic() - start < 1


async def refused(reader: asyncio.StreamReader, status: int, code: str) -> str:
    """Reads an answer that ends the connection."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and b"connection: close" in head.lower(), head
    error = json.loads(body)["error"]
    assert error["code"] == code
    return str(error["message"])


@pytest.mark.parametrize("head", [b"POST /v1/", b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Slow: "])
async def test_a_head_that_comes_byte_by_byte(setup: Setup, head: bytes) -> None:
    front = await setup.front(await setup.worker(), timeouts={"header_seconds": 0.4})
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(head)

    async def trickle() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"x")

    trickling = asyncio.create_task(trickle())
    start = time.monotonic()
    async with asyncio.timeout(5):
        message = await refused(reader, 408, "request_timeout")
    assert "0.4 s" in message and 0.3 < time.monotonic() - start < 2
    trickling.cancel()
    writer.close()


async def test_a_head_in_pieces_that_comes_in_time_and_what_waits_between_requests(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"header_seconds": 0.4})
    worker.answer = streaming(b"data: 1\n\n", pause=0.6)
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    for _ in range(2):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"Content-Length: 13\r\n\r\n" + b'{"model":"m"}')
        async with asyncio.timeout(3):
            assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.6)
    writer.close()


async def test_a_body_that_comes_byte_by_byte(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"body_seconds": 0.3})
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n")
    for _ in range(5):
        writer.write(b"{")
        await asyncio.sleep(0.05)
    async with asyncio.timeout(3):
        line = await reader.readuntil(b"}}")
    assert line.startswith(b"HTTP/1.1 408") and b"0.3 s" in line
    writer.close()
    worker.answer = streaming(b"data: 1\n\n", pause=0.5)
    async with await front.chat() as answer:
        assert answer.status == 200 and await answer.read(), "the limit ends with the body"


async def test_connections_of_one_address(setup: Setup) -> None:
    front = await setup.front(await setup.worker(), limits={"connections_per_address": 5})
    kept = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(5)]
    await until(lambda: len(front.runner.server.connections) == 5)  # type: ignore[union-attr]
    reader, _ = await asyncio.open_connection("127.0.0.1", front.port)
    message = await refused(reader, 429, "overloaded")
    assert "limits.connections_per_address" in message and "5" in message
    other, writer = await asyncio.open_connection("127.0.0.1", front.port, local_addr=("127.0.0.2", 0))
    writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert (await other.read()).startswith(b"HTTP/1.1 200"), "others are not meant"
    kept[0][1].close()
    await until(lambda: len(front.runner.server.connections) == 4)  # type: ignore[union-attr]
    again, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert (await again.read()).startswith(b"HTTP/1.1 200")
    for _, open_writer in kept:
        open_writer.close()


def test_the_example_names_the_limits() -> None:
    text = (Path(__file__).parents[2] / "etc" / "syshax-api.toml").read_text()
    for name in ("connections_per_address", "header_seconds", "body_seconds"):
        assert f"# {name} = " in text
