"""Clients that are slow on purpose: each holds its own connection for a bounded time and nothing else."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from aiohttp import web
from front_fixtures import Setup, until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}'


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_a_client_that_stops_reading_is_given_up(setup: Setup, kind: str) -> None:
    """Its worker is freed after timeouts.idle_seconds, and so is its place: the error event cannot be sent either."""
    worker = await setup.worker()
    front = await setup.front(worker, timeouts={"idle_seconds": 0.5})

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    worker.answer = answer
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(POST)
        await until(lambda: bool(front.app.proxy.active))
        begin = time.monotonic()
        await until(lambda: not front.app.proxy.active, 10)
        assert 0.4 < time.monotonic() - begin < 6
        async with asyncio.timeout(1):
            await worker.cancelled.wait()


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: h\r\nX-A"])
async def test_a_head_that_does_not_end_is_closed(setup: Setup, begun: bytes) -> None:
    front = await setup.front(await setup.worker(), timeouts={"keepalive_seconds": 0.5})
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(begun)
    async with asyncio.timeout(3):
        while await reader.read(1000):
            pass
    writer.close()
    await writer.wait_closed()


async def test_a_head_that_trickles_is_closed(setup: Setup) -> None:
    """A byte now and then does not keep the connection."""
    front = await setup.front(await setup.worker(), timeouts={"keepalive_seconds": 0.5})
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    begin = time.monotonic()
    writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\nX-A: ")
    while not reader.at_eof() and time.monotonic() - begin < 5:
        writer.write(b"a")
        try:
            async with asyncio.timeout(0.1):
                await reader.read(1000)
        except (TimeoutError, ConnectionError):
            pass
    assert time.monotonic() - begin < 4
    writer.close()
