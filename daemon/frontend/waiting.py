"""Requests that wait for a worker: how many, how long, who is next, and what those hear that may not wait.

Requests of one model and priority wait in one line, first come, first served. Where lines meet at a worker their
priorities share it by weight (self-clocked fair queueing), so that the higher one goes first and none starves. Whose
turn it is at a worker gets the best one for it of all that have a place, as if nobody waited.

The processes of one front-end tell each other no more than how many wait (board). A place that becomes free in one
process goes to its own line with the share that this line has of all, else it is left: the others look every
`_POLL_SECONDS`, and so does this one, for places that others left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic

from syshaxd.frontend.board import Board, Cell
from syshaxd.frontend.config import PRIORITIES, Queue
from syshaxd.frontend.errors import ApiError, Kind, quoted
from syshaxd.frontend.pace import retry_after
from syshaxd.frontend.workers import Worker

_WEIGHTS = (16, 4, 1)
"""Of interactive, normal and batch, where all three wait for the same worker."""
_POLL_SECONDS = 0.01
_LEFT_SECONDS = 0.1
"""A place that has been left for other processes so long is taken: they cannot use it."""


class Turns:
    """Which priority is next at one worker: the one whose next request would end first if each ran at its weight."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ended = [0.0] * len(_WEIGHTS)
        self._ends: list[float | None] = [None] * len(_WEIGHTS)

    def order(self, waiting: Collection[int]) -> list[int]:
        """The priorities that wait, the next one first."""
        ends = self._ends
        for priority, weight in enumerate(_WEIGHTS):
            if priority not in waiting:
                ends[priority] = None
            elif ends[priority] is None:
                ends[priority] = max(self._ended[priority], self._now) + 1 / weight
        return sorted(waiting, key=lambda priority: (ends[priority], priority))

    def took(self, priority: int) -> None:
        """A request of a priority that `order` named got the place."""
        end = self._ends[priority]
        assert end is not None
        self._now = self._ended[priority] = end
        self._ends[priority] = None


@dataclass(eq=False)
class _Waiter:
    choose: Callable[[], Worker | None]
    place: asyncio.Future[Worker]
    since: float = field(default_factory=monotonic)


class _Line:
    """Those who wait for one model with one priority."""

    def __init__(self, model: str | None, priority: int, board: Board) -> None:
        self.model, self.priority = model, priority
        self.waiters: dict[_Waiter, bool] = {}
        self.everywhere: Cell = board.cell(f"waiting {PRIORITIES[priority]} {model or ''}")

    def oldest(self) -> float:
        return next(iter(self.waiters)).since


class Waiting:
    """All lines of this process."""

    def __init__(
        self,
        settings: Queue,
        board: Board,
        candidates: Callable[[str | None, int], list[Worker]],
        free: Callable[[Worker], bool],
        reserve: Callable[[Worker], bool],
        give_back: Callable[[Worker], None],
    ) -> None:
        """`candidates` of a model and priority, `ApiError` if none; `free`: it may have one more request;
        `reserve`: it has one more, if it may."""
        self._settings = settings
        self._board = board
        self._candidates, self._free, self._reserve, self._give_back = candidates, free, reserve, give_back
        self._lines: dict[tuple[str | None, int], _Line] = {}
        self._turns: dict[Worker, Turns] = {}
        self._left: dict[Worker, float] = {}
        self._polling = False
        self.count = 0
        """How many wait in this process."""
        self.everywhere = board.cell("waiting")
        self.random = random.Random()

    def counts(self) -> dict[tuple[str | None, str], int]:
        """(model, priority) -> requests that wait, in all processes; lines that this process has seen."""
        return {key: line.everywhere.total() for key, line in self._named()}

    def _named(self) -> list[tuple[tuple[str | None, str], _Line]]:
        return [((model, PRIORITIES[priority]), line) for (model, priority), line in self._lines.items()]

    async def wait(self, model: str | None, priority: int, choose: Callable[[], Worker | None]) -> Worker:
        """A worker with a place reserved. `ApiError` 429 when too many wait, or after queue.wait_seconds.

        `choose`: the best candidate of those that are free when it is this request's turn; None: they all are as good.
        """
        line = self._line(model, priority)
        if line.everywhere.total() >= self._settings.length:
            raise self._refusal(line, "are in line already")
        waiter = _Waiter(choose, asyncio.get_running_loop().create_future())
        self._enter(line, waiter)
        try:
            async with asyncio.timeout(self._settings.wait_seconds):
                await waiter.place
        except TimeoutError:
            if waiter.place.cancelled():
                self._candidates(model, priority)
                raise self._refusal(line, f"wait, and this one has for {self._settings.wait_seconds:g} s") from None
        except BaseException:
            if waiter.place.done() and not waiter.place.cancelled():
                self._give_back(waiter.place.result())
            raise
        finally:
            self._leave(line, waiter)
        return waiter.place.result()

    def fill(self, worker: Worker) -> None:
        """Serves those who wait, in their order at this worker, until its free places are taken."""
        while self.count and self._free(worker):
            line = self._next(worker)
            if line is None:
                return
            waiter = next(iter(line.waiters))
            chosen = waiter.choose() or worker
            if not self._reserve(chosen):
                return
            self._leave(line, waiter)
            self._turns[worker].took(line.priority)
            waiter.place.set_result(chosen)
        self._left.pop(worker, None)

    def _enter(self, line: _Line, waiter: _Waiter) -> None:
        line.waiters[waiter] = True
        line.everywhere.add(1)
        self.everywhere.add(1)
        self.count += 1
        for worker in self._who(line):
            self.fill(worker)
        if not self._polling and self.count:
            self._polling = True
            asyncio.get_running_loop().call_later(_POLL_SECONDS, self._poll)

    def _leave(self, line: _Line, waiter: _Waiter) -> None:
        if line.waiters.pop(waiter, False):
            line.everywhere.add(-1)
            self.everywhere.add(-1)
            self.count -= 1

    def _poll(self) -> None:
        self._polling = bool(self.count)
        if not self._polling:
            self._left.clear()
            return
        asyncio.get_running_loop().call_later(_POLL_SECONDS, self._poll)
        for worker in {w for line in self._lines.values() if line.waiters for w in self._who(line)}:
            self.fill(worker)

    def _who(self, line: _Line) -> list[Worker]:
        try:
            return self._candidates(line.model, line.priority)
        except ApiError:
            return []

    def _next(self, worker: Worker) -> _Line | None:
        """Whose turn it is; None: nobody's, or that of another process."""
        lines = [line for line in self._lines.values() if self._waits(line) and worker in self._who(line)]
        turns = self._turns.setdefault(worker, Turns())
        for priority in turns.order({line.priority for line in lines}):
            those = [line for line in lines if line.priority == priority]
            everywhere = sum(line.everywhere.total() for line in those)
            here = sum(len(line.waiters) for line in those)
            if here < everywhere and self.random.random() * everywhere >= here and self._leave_to_others(worker):
                turns.took(priority)
                return None
            if here:
                return min((line for line in those if line.waiters), key=_Line.oldest)
        return None

    def _waits(self, line: _Line) -> bool:
        for waiter in [waiter for waiter in line.waiters if waiter.place.done()]:
            self._leave(line, waiter)
        return line.everywhere.total() > 0

    def _leave_to_others(self, worker: Worker) -> bool:
        now = monotonic()
        if now - self._left.setdefault(worker, now) < _LEFT_SECONDS:
            return True
        del self._left[worker]
        return False

    def _line(self, model: str | None, priority: int) -> _Line:
        if (line := self._lines.get((model, priority))) is None:
            line = self._lines[model, priority] = _Line(model, priority, self._board)
        return line

    def _refusal(self, line: _Line, what: str) -> ApiError:
        pace = sum(worker.pace.per_second() for worker in self._who(line))
        which = f"the model `{quoted(line.model)}`" if line.model else "this"
        return ApiError(
            Kind.OVERLOADED,
            f"All workers for {which} have enough to do: {line.everywhere.total()} requests of this priority {what}; "
            "try again later.",
            headers=retry_after(len(line.waiters) + 1, pace, self._settings.wait_seconds),
        )
