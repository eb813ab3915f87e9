"""`processes = N`: holds the port, accepts, and has N children answer. No request passes through it.

It accepts and gives each connection to the child that has fewest, since children that accept by themselves share
connections unevenly, and sockets of their own (SO_REUSEPORT) lose those that wait when one of them ends
(docs/decisions/0016).

A child that ends or hangs is replaced at once. SIGTERM, SIGINT and SIGHUP mean what they mean for one process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any

from syshax.errors import InternalError, SyshaxError
from syshaxd.frontend.board import Board
from syshaxd.frontend.children import Child, Children
from syshaxd.frontend.commands import reload_and_tell
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.control import Control
from syshaxd.frontend.fleet import Fleet
from syshaxd.frontend.listening import address_of, listen
from syshaxd.frontend.process import Stop, keep_alive, key_ring
from syshaxd.frontend.proxy import IN_PROGRESS
from syshaxd.frontend.server import BREAK_OFF_SECONDS
from syshaxd.systemd import Notifier, take_handed, watchdog_seconds

log = logging.getLogger("syshax.api")
_AT_ONCE = 64
_PAUSE_SECONDS = 0.1
"""Before accepting again when nothing can be accepted or given."""
_TELL_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_START_SECONDS = 60.0
_HANG_SECONDS = 30.0
"""A child whose loop does not turn for so long is killed, or after systemd's WatchdogSec= where that is set."""
_ANSWER_SECONDS = 10.0
_EXIT_SECONDS = 5.0
_FIRST_DELAY, _LONGEST_DELAY, _LIVED_SECONDS = 0.1, 5.0, 10.0
_START_HINT = "the service's limits: TasksMax=, MemoryMax=, LimitNOFILE= (`systemctl show syshax-api`)"
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Supervisor:
    """From sockets to exit status."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._keys = key_ring(config)
        self._notifier = Notifier()
        self._board = Board.share(config.processes + 1)
        self._children = Children(self._board, self._pause)
        self._fleet = Fleet(config, self.ask_all)
        self._control = Control(config, self._fleet)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = self._accepting = False
        self._again: asyncio.TimerHandle | None = None
        self._told = -_TELL_SECONDS
        self._begun = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None

    async def run(self) -> int:
        """Until a signal; the exit status. Raises `SyshaxError` when it cannot listen or children do not start."""
        handed = [given for _, given in take_handed().sockets]
        self._listeners = handed or listen(self._config)
        for listener in self._listeners:
            listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        if self._keys is not None:
            self._keys.count_on(self._board)
        stop = Stop(self._kill)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._keep(reload_and_tell(self._reload)))
        rows = [self._keep(self._keep_up(row)) for row in range(1, self._board.rows)]
        try:
            stopped, begun = self._keep(stop.wait()), self._keep(self._begun.wait())
            await asyncio.wait([stopped, begun, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if begun.done():
                log.info("listening on %s", ", ".join(address_of(listener) for listener in self._listeners))
                self._accept_again()
                await self._control.start()
                self._notifier.ready("listening")
            self._keep(self._look())
            self._keep(keep_alive(self._notifier))
            await stop.wait()
            await self._control.close()
            await self._drain(rows, bool(handed))
        finally:
            self._stopping = True
            self._kill()
            for task in self._tasks - set(rows):
                task.cancel()
            await asyncio.gather(*rows, return_exceptions=True)
        log.info("stopped")
        return 0

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _kill(self) -> None:
        for child in self._children.by_row.values():
            child.kill()

    # ------------------------------------------------------------------ children

    async def _keep_up(self, row: int) -> None:
        """A child in that row, and another when it ends or could not be started."""
        delay = 0.0
        while not self._stopping:
            lived = await self._live(row)
            self._accept_again()
            if self._stopping:
                return
            delay = 0.0 if lived >= _LIVED_SECONDS else min(max(2 * delay, _FIRST_DELAY), _LONGEST_DELAY)
            await asyncio.sleep(delay)

    async def _live(self, row: int) -> float:
        """One child, to its end. For how many seconds it lived; 0 when it did not begin."""
        try:
            child = await self._children.start(row)
        except OSError as error:
            self._not_begun(InternalError(f"cannot start a process: {error.strerror or error}", _START_HINT))
            return 0.0
        await self._begin(child)
        status = await self._children.ended(child)
        if not child.leaving and not self._stopping:
            log.error("process %d %s; another takes its place", child.process.pid, _end_of(status))
        return monotonic() - child.started if child.up else 0.0

    async def _begin(self, child: Child) -> None:
        try:
            await child.begin(self._config, self._now, self._keys.past() if self._keys is not None else {})
        except (SyshaxError, ConnectionError) as error:
            child.kill()
            self._not_begun(error if isinstance(error, SyshaxError) else InternalError("a process ended as it started"))
            return
        if self._stopping:
            child.channel.tell("drain")
        if all(other.up for other in self._children.by_row.values()) and len(self._children.by_row) == self._all:
            self._begun.set()
        self._accept_again()

    def _not_begun(self, error: SyshaxError) -> None:
        """The service ends with that while it starts itself; once it runs the child is tried again."""
        assert self._failed is not None
        if self._stopping:
            return
        if self._begun.is_set():
            log.error("a process that is to take another's place does not start: %s", error)
        elif not self._failed.done():
            self._failed.set_exception(error)

    def _now(self) -> dict[str, Any]:
        return {"wanted": self._fleet.wanted(), "keys": self._keys.rows() if self._keys is not None else None}

    @property
    def _all(self) -> int:
        return self._board.rows - 1

    async def _look(self) -> None:
        """Kills children that hang, and keeps systemd's status line true."""
        hang = watchdog_seconds() or _HANG_SECONDS
        last = monotonic()
        forgiven = 0.0
        while True:
            now = monotonic()
            if now - last > 4 * _LOOK_SECONDS:  # we did not run: perhaps no process did
                forgiven = now + hang
            last = now
            for child in list(self._children.by_row.values()):
                silent = self._children.silent_seconds(child)
                if silent > (hang if child.up else max(hang, _START_SECONDS)) and now > forgiven:
                    log.error("process %d has not answered for %.0f s: it is killed", child.process.pid, silent)
                    child.kill()
            self._notifier.status(self._status())
            await asyncio.sleep(_LOOK_SECONDS)

    def _status(self) -> str:
        up = [child for child in self._children.by_row.values() if child.up]
        count = f"{self._all} processes" if len(up) == self._all else f"{len(up)} of {self._all} processes"
        return "; ".join([count, *dict.fromkeys(child.status for child in up)])

    async def ask_all(self, name: str, **fields: Any) -> list[Any]:
        """The answers of all children that are up; those that do not answer in time, or end, are left out.

        Raises the first `SyshaxError` of them.
        """
        asked = [child for child in self._children.by_row.values() if child.up]

        async def ask(child: Child) -> list[Any]:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    return [await child.channel.ask(name, **fields)]
            except (TimeoutError, ConnectionError):
                log.warning("process %d did not answer to %s", child.process.pid, name)
                return []

        return [answer for answers in await asyncio.gather(*(ask(child) for child in asked)) for answer in answers]

    async def _reload(self) -> int | None:
        if self._keys is None:
            return None
        self._keys.reload()
        await self.ask_all("take_keys", rows=self._keys.rows())
        return len(self._keys)

    # --------------------------------------------------------------- connections

    def _accept_again(self) -> None:
        """Gives what waits; accepts more if all of that could be given, else tries again later (`_pause`)."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._children.give_waiting()
        if self._begun.is_set() and not self._stopping and not self._children.waiting and not self._accepting:
            self._accepting = True
            for listener in self._listeners:
                asyncio.get_running_loop().add_reader(listener, self._accept, listener, _AT_ONCE)

    def _pause(self) -> None:
        """Nothing can be accepted or given; that is tried again in a moment, as often as it takes."""
        if self._accepting:
            self._accepting = False
            for listener in self._listeners:
                asyncio.get_running_loop().remove_reader(listener)
        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._accept_again)

    def _accept(self, listener: socket.socket, most: int) -> None:
        for _ in range(most):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if monotonic() - self._told > _TELL_SECONDS:
                    self._told = monotonic()
                    log.error("cannot accept connections: %s", error.strerror)
                self._pause()
                return
            self._children.give(connection)
            if self._children.waiting:
                return

    # -------------------------------------------------------------------- the end

    async def _drain(self, rows: list[asyncio.Task[Any]], handed: bool) -> None:
        """handed: connections that we have not accepted are left in the socket, for the next life of this service."""
        self._notifier.stopping(f"finishing {self._board.cell(IN_PROGRESS).total()} requests")
        self._stopping = True
        self._pause()
        for listener in self._listeners:
            if not handed:
                self._accept(listener, 1 << 16)
            listener.close()
        self._children.give_waiting()
        for child in self._children.by_row.values():
            if child.up:
                child.channel.tell("drain")
            else:
                child.kill()
        seconds = self._config.timeouts.drain_seconds + BREAK_OFF_SECONDS + _EXIT_SECONDS
        _, left = await asyncio.wait(rows, timeout=seconds)
        if left:
            log.error("%d processes did not end in time: they are killed", len(left))
        for connection in self._children.waiting:
            with suppress(OSError):
                connection.close()
        self._children.waiting.clear()


def _end_of(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
