"""Hosts that vanish without a word: what TCP is told about connections, and what a request makes of their end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest
import uvloop
from front_fixtures import FakeWorker, Front, Setup, echo, error_of, silent, until

from syshaxd.frontend import upstream
from syshaxd.frontend.upstream import Upstream, _Connection

OPTIONS = {
    "keepalive": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "idle": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    "every": (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    "probes": (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
    "unread ms": (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
}


def options_of(transport: asyncio.BaseTransport) -> dict[str, int]:
    found = transport.get_extra_info("socket")
    return {name: found.getsockopt(*option) for name, option in OPTIONS.items()}


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_worker_that_vanishes_is_noticed_by_tcp(run: Any) -> None:
    async def connect() -> dict[str, int]:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        made = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 5.0, 4096)
        found = options_of((await made._connect()).transport)
        await made.close()
        server.close()
        return found

    assert run(connect()) == {"keepalive": 1, "idle": 10, "every": 5, "probes": 3, "unread ms": 25_000}


async def test_a_client_that_vanishes_is_noticed_by_tcp(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = silent
    front = await setup.front(worker)
    request = asyncio.create_task(front.chat())
    await until(lambda: bool(worker.seen))
    (exchange,) = front.app.proxy.active
    assert exchange.request.transport is not None
    found = options_of(exchange.request.transport)
    assert found == {"keepalive": 1, "idle": 30, "every": 15, "probes": 4, "unread ms": 0}
    request.cancel()


class Lines:
    """The connections to workers, so that the test can have one end as the kernel ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[_Connection] = []
        real = _Connection.connection_made

        def connection_made(connection: _Connection, transport: asyncio.BaseTransport) -> None:
            self.made.append(connection)
            real(connection, transport)

        monkeypatch.setattr(upstream._Connection, "connection_made", connection_made)

    def time_out(self) -> None:
        """The one with a request under way."""
        (line,) = [line for line in self.made if line._answer is not None and not line.transport.is_closing()]
        line.connection_lost(OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        line.transport.abort()


async def begun(setup: Setup, monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[Front, Lines, list[FakeWorker]]:
    """A front-end whose workers are checked once and never answer a request."""
    lines, workers = Lines(monkeypatch), [await setup.worker() for _ in range(count)]
    for worker in workers:
        worker.answer = silent
    front = await setup.front(*workers, health={"interval_seconds": 60, "retry_seconds": 60})
    return front, lines, workers


async def test_a_request_moves_to_another_worker_when_its_own_has_vanished(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, lines, workers = await begun(setup, monkeypatch, 2)
    request = asyncio.create_task(front.chat())
    await until(lambda: any(worker.seen for worker in workers))
    other = next(worker for worker in workers if not worker.seen)
    other.answer = echo
    lines.time_out()
    assert (await request).status == 200 and len(other.seen) == 1
    assert sum(front.metric("syshax_api_retries_total", worker=worker.url) for worker in workers) == 1


async def test_a_request_fails_when_there_is_no_other_worker(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    front, lines, (worker,) = await begun(setup, monkeypatch, 1)
    request = asyncio.create_task(front.chat())
    for count in (1, 2):
        await until(lambda n=count: len(worker.seen) == n)  # type: ignore[misc]
        lines.time_out()
    assert "connection timed out" in (await error_of(await request, 502, "worker_failed"))["message"]
