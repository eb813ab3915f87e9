"""The children of a supervisor: started by exec, watched, and given connections so that all have equally many."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from asyncio.subprocess import Process as Subprocess
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from syshaxd.frontend.board import Board
from syshaxd.frontend.channel import Channel
from syshaxd.frontend.child import ALIVE
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.connections import OPEN_CONNECTIONS
from syshaxd.frontend.passing import Giver, pair
from syshaxd.frontend.proxy import IN_PROGRESS

log = logging.getLogger("syshax.api")
_SUSPECT_SECONDS = 3.0
"""A child that has been silent for so long gets connections only when there is no other."""
_FULL_SECONDS = 1.0
"""A child without a free descriptor gets no connection for so long."""
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Child:
    """One child, as its supervisor sees it."""

    def __init__(self, row: int, process: Subprocess, channel: Channel, giver: Giver) -> None:
        self.row, self.process, self.channel, self.giver = row, process, channel, giver
        self.started = monotonic()
        self.up = False
        """It takes connections, and is told of every change."""
        self.leaving = False
        self.full_until = 0.0
        """It had no descriptor left."""
        self.status = ""
        self.serving = asyncio.create_task(channel.serve(self._hear))

    async def begin(self, config: ApiConfig, now: Callable[[], dict[str, Any]], past: dict[str, Any]) -> None:
        """Until it takes connections. `now`: what may differ from the configuration; `past`: `KeyRing.past`.

        Raises `SyshaxError`, or `ConnectionError` when it ends instead.
        """
        told = now()
        self.status = await self.channel.ask("begin", config=config.model_dump(mode="json"), past=past, **told)
        while told != (latest := now()):  # from here to `up` nothing is awaited: it is told what changes after that
            told = latest
            await self.channel.ask("set_workers", wanted=told["wanted"])
            await self.channel.ask("take_keys", rows=told["keys"])
        self.up = True

    async def _hear(self, name: str, **fields: Any) -> None:
        if name == "status":
            self.status = fields["text"]
        elif name == "leaving":
            self.leaving = True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()


class Children:
    """All of them, by row of the board."""

    def __init__(self, board: Board, left_waiting: Callable[[], None]) -> None:
        """`left_waiting` is called whenever a connection must wait: `give_waiting` is due in a moment."""
        self._board, self._left_waiting = board, left_waiting
        self._alive = board.cell(ALIVE)
        self._connections, self._requests = board.cell(OPEN_CONNECTIONS), board.cell(IN_PROGRESS)
        self.by_row: dict[int, Child] = {}
        self.waiting: list[socket.socket] = []
        """Connections that nobody could be given yet."""

    async def start(self, row: int) -> Child:
        """A new child in that row; it has not begun. `OSError` when the system does not let it start."""
        channel, their_channel = socket.socketpair()
        connections, their_connections = pair()
        assert self._board.descriptor is not None
        given = (their_channel.fileno(), their_connections.fileno(), self._board.descriptor)
        words = [str(number) for number in (*given, self._board.rows, row)]
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "syshaxd.frontend.child", *words, pass_fds=given, env=environment
            )
        except OSError:
            channel.close()
            connections.close()
            raise
        finally:
            their_channel.close()
            their_connections.close()
        channel.setblocking(False)
        giver = Giver(connections, lambda connection: self._refused(child, connection))
        child = Child(row, process, await Channel.open(channel), giver)
        self.by_row[row] = child
        return child

    async def ended(self, child: Child) -> int:
        """Waits for its end; what it had counted is kept, what it had not taken goes to others. Its exit status."""
        status = await child.process.wait()
        self.by_row.pop(child.row, None)
        self._board.retire(child.row)
        child.serving.cancel()
        for connection in child.giver.close():
            self.give(connection)
        return status

    def give(self, connection: socket.socket) -> None:
        """To the child with the fewest connections, then requests, then turns; it waits while no child can take it."""
        connections, requests, alive = self._connections.parts(), self._requests.parts(), self._alive.parts()
        suspect = int((monotonic() - _SUSPECT_SECONDS) * 1000)

        def load(child: Child) -> tuple[bool, int, int, int]:
            row = child.row
            return alive[row] < suspect, connections[row] + len(child.giver.untaken), requests[row], child.giver.given

        now = monotonic()
        able = [child for child in self.by_row.values() if child.up and not child.leaving and now >= child.full_until]
        if not any(child.giver.give(connection) for child in sorted(able, key=load)):
            self.waiting.append(connection)
            self._left_waiting()

    def _refused(self, child: Child, connection: socket.socket) -> None:
        child.full_until = monotonic() + _FULL_SECONDS
        self.give(connection)

    def give_waiting(self) -> None:
        """Tries again."""
        waiting, self.waiting = self.waiting, []
        for connection in waiting:
            self.give(connection)

    def silent_seconds(self, child: Child) -> float:
        """How long its loop has not turned."""
        return monotonic() - (self._alive.parts()[child.row] / 1000 or child.started)
