"""The fake worker of the API benchmark: it answers at once, with bytes that are prepared, so that it is not what is
measured. A request's own fields say what is wanted: `gap_ms` above 0 gives a stream with one event in that time, 0 a
stream as fast as it is taken, none a whole answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import suppress
from typing import cast

from syshaxd.bench import api_wire as wire

TICK_SECONDS = 0.001
_WRITES_AT_ONCE = 4
"""Blocks that a stream at full speed writes before others have their turn."""


class Pacer:
    """Streams that get one event each `gap` seconds; all of one pace, so a queue by due time stays in order."""

    def __init__(self, gap: float) -> None:
        self.gap = gap
        self._due: deque[tuple[float, Connection]] = deque()
        self._loop = asyncio.get_running_loop()
        self._ticking = False

    def add(self, stream: Connection) -> None:
        """The first event comes with the headers, the next one after a gap."""
        self._due.append((self._loop.time() + self.gap, stream))
        if not self._ticking:
            self._ticking = True
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now, due = self._loop.time(), self._due
        for _ in range(len(due)):
            at, stream = due[0]
            if at > now:
                break
            due.popleft()
            if stream.open:
                if not stream.full:
                    stream.transport.write(wire.EVENT)
                due.append((at + self.gap, stream))
        self._ticking = bool(due)
        if due:
            self._loop.call_later(TICK_SECONDS, self._tick)


class Connection(asyncio.Protocol):
    """One connection of a front-end."""

    transport: asyncio.Transport

    def __init__(self, pacers: dict[float, Pacer]) -> None:
        self.open = True
        self.full = False
        """The other side does not read as fast as we write."""
        self._pacers = pacers
        self._data = b""
        self._flooding = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self._flooding:
            self._flood()

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        while size := wire.whole_message(self._data):
            message, self._data = self._data[:size], self._data[size:]
            self._answer(message)

    def _answer(self, message: bytes) -> None:
        if message.startswith(b"GET"):
            self.transport.write(wire.MODELS if message.startswith(b"GET /v1/models") else wire.EMPTY)
        elif b'"gap_ms"' not in message:
            self.transport.write(wire.COMPLETION)
        else:
            gap = json.loads(message.partition(b"\r\n\r\n")[2])["gap_ms"] / 1e3
            self.transport.write(wire.STREAM_HEAD + wire.EVENT)
            self._flooding = not gap
            if self._flooding:
                self._flood()
                return
            if gap not in self._pacers:
                self._pacers[gap] = Pacer(gap)
            self._pacers[gap].add(self)

    def _flood(self) -> None:
        for _ in range(_WRITES_AT_ONCE):
            if self.full or not self.open:
                return
            self.transport.write(wire.BLOCK)
        asyncio.get_running_loop().call_soon(self._flood)


async def serve() -> asyncio.Server:
    """A worker on a free port of this machine."""
    pacers: dict[float, Pacer] = {}
    return await asyncio.get_running_loop().create_server(lambda: Connection(pacers), "127.0.0.1", 0, backlog=4096)


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def close(server: asyncio.Server) -> None:
    server.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(server.wait_closed(), 1)
