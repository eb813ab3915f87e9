"""A process that a supervisor started: `python -m syshaxd.frontend.child CHANNEL CONNECTIONS BOARD ROWS ROW` names
descriptors and its place on the board. It listens on nothing; connections come from the supervisor.

It ends when it is told to, at SIGTERM, and when its supervisor is gone; each time what runs is finished first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from time import monotonic
from typing import Any

from syshaxd.config import LoggingConfig
from syshaxd.frontend.board import Board
from syshaxd.frontend.channel import Channel
from syshaxd.frontend.commands import Commands
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.passing import Taker
from syshaxd.frontend.process import FIRST_LOOK_SECONDS, key_ring, readiness, run_loop
from syshaxd.frontend.server import Server
from syshaxd.logs import set_up_logging

log = logging.getLogger("syshax.api")
ALIVE = "alive"
"""The board's cell of the moment, in ms, in which a process's loop last turned."""
_BEAT_SECONDS = 0.5


class Child:
    """From descriptors to exit status."""

    def __init__(self, channel: int, connections: int, board: int, rows: int, row: int) -> None:
        for descriptor in (channel, connections, board):
            os.set_inheritable(descriptor, False)
        self._channel_end, self._connections = socket.socket(fileno=channel), socket.socket(fileno=connections)
        self._board = Board(rows, row, board)
        self._alive = self._board.cell(ALIVE)
        self._server: Server | None = None
        self._commands: Commands | None = None
        self._taker: Taker | None = None
        self._end = asyncio.Event()

    async def run(self) -> int:
        self._channel_end.setblocking(False)
        self._channel = await Channel.open(self._channel_end)
        self._handle_signals()
        beat = asyncio.create_task(self._beat())
        serving = asyncio.create_task(self._channel.serve(self._do))
        serving.add_done_callback(lambda _: self._supervisor_gone())
        await self._end.wait()
        if self._server is not None and self._taker is not None:
            self._channel.tell("leaving")
            self._taker.take(1 << 16)
            await self._server.drain()
            await self._taker.stop()
            if self._server.runner.server is not None and self._server.runner.server.connections:
                await self._server.drain()  # one came as the others ended
            await self._server.close()
        beat.cancel()
        serving.cancel()
        return 0

    async def _do(self, name: str, **fields: Any) -> Any:
        if name == "begin":
            return await self._begin(**fields)
        if name == "drain":
            return self._end.set()
        assert self._commands is not None
        return await self._commands.do(name, **fields)

    async def _begin(
        self,
        config: dict[str, Any],
        wanted: list[dict[str, Any]],
        keys: dict[str, Any] | None,
        past: dict[str, Any],
    ) -> str:
        """The readiness, once workers have been looked at."""
        settings = ApiConfig.model_validate(config)
        set_up_logging(LoggingConfig(level=settings.logging.level, format=settings.logging.format), "syshax-api")
        ring = key_ring(settings, keys)
        self._server = Server(settings, ring, self._board)
        if ring is not None:
            ring.recall(past)
        self._commands = Commands(self._server, settings.timeouts.drain_seconds)
        await self._server.start()
        self._server.app.workers.start()
        await self._commands.set_workers(wanted)
        await self._server.app.workers.first_look(FIRST_LOOK_SECONDS)
        self._taker = Taker(self._connections, self._server.protocol)
        self._taker.start()
        return readiness(self._server.app)

    def _handle_signals(self) -> None:
        """The terminal's signals go to all of its processes; the supervisor says what they mean for us."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end.set)
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)

    def _supervisor_gone(self) -> None:
        if not self._end.is_set():
            log.warning("the supervisor is gone: this process finishes what it has and ends")
            self._end.set()

    async def _beat(self) -> None:
        told = ""
        while True:
            self._alive.set(int(monotonic() * 1000))
            if self._server is not None and self._taker is not None:
                now = readiness(self._server.app)
                if now != told:
                    self._channel.tell("status", text=now)
                    told = now
            await asyncio.sleep(_BEAT_SECONDS)


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:]]

    async def run() -> int:
        return await Child(*numbers).run()

    return run_loop(run)


if __name__ == "__main__":
    sys.exit(main())
