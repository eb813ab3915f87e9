"""Waiting in line: bounded by number and time, by priority without starvation, left at once, fair over processes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from front_fixtures import FakeWorker, Front, Setup, error_of, silent, streaming, until, write_keys
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.frontend.board import Board
from syshaxd.frontend.config import Queue
from syshaxd.frontend.errors import ApiError, Kind
from syshaxd.frontend.pace import Pace, retry_after
from syshaxd.frontend.waiting import Turns, Waiting
from syshaxd.frontend.workers import Worker


class Gate:
    """An answer that comes when the test says so; it notes the order in which requests came."""

    def __init__(self, worker: FakeWorker) -> None:
        self.came: list[str] = []
        self._open: list[asyncio.Event] = []
        worker.answer = self

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.came.append((await request.json())["user"])
        gate = asyncio.Event()
        self._open.append(gate)
        await gate.wait()
        return web.json_response({"user": self.came[-1]})

    def finish(self) -> None:
        self._open.pop(0).set()


async def waiting(front: Front, count: int) -> None:
    await until(lambda: front.app.router.waiting.count == count)


def ask(front: Front, name: str, **more: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(front.chat(user=name, **more))


async def test_what_does_not_fit_waits_and_comes_in_its_order(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 2})
    gate = Gate(worker)
    requests = []
    for number, name in enumerate("abcde"):
        requests.append(ask(front, name))
        await until(lambda n=number: len(gate.came) + front.app.router.waiting.count == n + 1)
    assert gate.came == ["a", "b"] and front.app.router.waiting.counts() == {("m", "normal"): 3}
    for _ in requests:
        gate.finish()
        await asyncio.sleep(0.02)
    assert [(await request).status for request in requests] == [200] * 5
    assert gate.came == list("abcde") and front.app.router.waiting.count == 0


async def test_the_line_is_bounded(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1, "length": 2, "wait_seconds": 30})
    gate = Gate(worker)
    requests = [ask(front, name) for name in "abc"]
    await waiting(front, 2)
    refused = await front.chat(user="d")
    assert refused.headers["Retry-After"] == "30", "no request has ended yet"
    assert "2 requests of this priority are in line" in (await error_of(refused, 429, "overloaded"))["message"]
    for _ in requests:
        gate.finish()
        await asyncio.sleep(0.02)
    assert [(await request).status for request in requests] == [200] * 3


async def test_without_a_line_every_further_request_is_refused(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1, "length": 0})
    gate = Gate(worker)
    first = ask(front, "a")
    await until(lambda: bool(gate.came))
    await error_of(await front.chat(user="b"), 429, "overloaded")
    gate.finish()
    assert (await first).status == 200


async def test_a_deadline_ends_the_waiting(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1, "wait_seconds": 0.2})
    gate = Gate(worker)
    first = ask(front, "a")
    await until(lambda: bool(gate.came))
    refused = await front.chat(user="b")
    assert "this one has for 0.2 s" in (await error_of(refused, 429, "overloaded"))["message"]
    assert int(refused.headers["Retry-After"]) >= 1 and front.app.router.waiting.count == 0
    gate.finish()
    assert (await first).status == 200 and gate.came == ["a"]


async def test_the_first_bytes_deadline_counts_the_time_in_line(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1}, timeouts={"first_byte_seconds": 0.5})
    gate = Gate(worker)
    first = ask(front, "a")
    await until(lambda: bool(gate.came))
    await asyncio.sleep(0.2)
    second = ask(front, "b")
    await error_of(await first, 504, "worker_timeout")
    await error_of(await second, 504, "worker_timeout")
    front.app.workers.all[0].outstanding.add(1)
    error = await error_of(await front.chat(user="c"), 429, "overloaded")
    assert "within 0.5 s" in error["message"] and front.app.router.waiting.count == 0
    front.app.workers.all[0].outstanding.add(-1)


async def test_a_deadline_while_no_worker_is_ready_says_that(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1, "wait_seconds": 0.5})
    gate = Gate(worker)
    first = ask(front, "a")
    await until(lambda: bool(gate.came))
    second = ask(front, "b")
    await waiting(front, 1)
    front.app.workers.all[0].draining = True
    await error_of(await second, 503, "not_ready")
    gate.finish()
    assert (await first).status == 200


async def test_a_client_that_goes_away_leaves_the_line_at_once(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1})
    gate = Gate(worker)
    first = ask(front, "a")
    await until(lambda: bool(gate.came))
    second, third = ask(front, "b"), ask(front, "c")
    await waiting(front, 2)
    second.cancel()
    async with asyncio.timeout(1):
        await waiting(front, 1)
    gate.finish()
    assert (await first).status == 200
    await until(lambda: len(gate.came) == 2)
    gate.finish()
    assert (await third).status == 200 and gate.came == ["a", "c"]
    assert front.app.workers.all[0].outstanding.total() == 0


async def test_a_worker_that_comes_takes_those_who_wait(setup: Setup) -> None:
    one, two = await setup.worker(), await setup.worker()
    two.healthy = False
    front = await setup.front(one, two.url, queue={"requests_per_worker": 1})
    gate = Gate(one)
    first = ask(front, "a")
    await until(lambda: bool(gate.came))
    second = ask(front, "b")
    await waiting(front, 1)
    two.healthy = True
    assert (await second).status == 200 and len(two.seen) == 1
    gate.finish()
    assert (await first).status == 200


async def test_priorities_in_line(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker()
    keys = write_keys(tmp_path / "keys", {name: {"priority": name} for name in ("interactive", "normal", "batch")})
    front = await setup.front(worker, keys=keys, queue={"requests_per_worker": 1})
    gate = Gate(worker)
    requests = [ask(front, "first", key="batch")]
    await until(lambda: bool(gate.came))
    for name in ("batch", "normal", "interactive"):
        for _ in range(3):
            requests.append(ask(front, name, key=name))
    await waiting(front, 9)
    for count in range(len(requests)):
        await until(lambda n=count: len(gate.came) == n + 1)
        gate.finish()
    assert gate.came == ["first", *["interactive"] * 3, *["normal"] * 3, *["batch"] * 3]
    assert [(await request).status for request in requests] == [200] * 10


async def test_the_limit_of_a_group_wins(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(groups={"g": {"workers": [worker.url], "requests_per_worker": 1}})
    await front.until_ready(1)
    gate = Gate(worker)
    requests = [ask(front, name) for name in "ab"]
    await waiting(front, 1)
    for _ in requests:
        await until(lambda: bool(gate._open))
        gate.finish()
    assert [(await request).status for request in requests] == [200] * 2


async def test_limits_requests_counts_those_who_wait(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, queue={"requests_per_worker": 1}, limits={"requests": 2})
    gate = Gate(worker)
    requests = [ask(front, "a"), ask(front, "b")]
    await waiting(front, 1)
    error = await error_of(await front.chat(user="c"), 429, "overloaded")
    assert "limits.requests" in error["message"]
    for _ in requests:
        await until(lambda: bool(gate._open))
        gate.finish()
    assert [(await request).status for request in requests] == [200] * 2


async def test_bodies_have_a_limit_together_until_their_answers_begin(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, limits={"bodies": 250_000}, queue={"requests_per_worker": 1})
    gate = Gate(worker)
    big = "x" * 100_000
    requests = [ask(front, "a", x=big), ask(front, "b", x=big)]
    await waiting(front, 1)
    error = await error_of(await front.chat(user="c", x=big), 429, "overloaded")
    assert "limits.bodies" in error["message"]
    small = ask(front, "d", x="x" * 1000)
    await waiting(front, 2)
    for _ in range(3):
        await until(lambda: bool(gate._open))
        gate.finish()
    assert [(await request).status for request in (*requests, small)] == [200] * 3
    worker.answer = streaming(b"data: 1\n\n", forever=True)
    streams = []
    for _ in range(4):
        front.app.workers.all[0].outstanding.set(0)  # as many places as there are streams
        streams.append(await front.chat(x=big))
    assert [stream.status for stream in streams] == [200] * 4, "bodies whose answers have begun count no more"
    for stream in streams:
        stream.close()
    await until(lambda: not front.app.proxy.active)
    assert front.app.board.cell("bytes of bodies").total() == 0


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"


@pytest.mark.parametrize("end", ["leaves", "too slow", "too large"])
async def test_a_body_that_is_not_complete_counts_as_it_comes_until_its_request_ends(setup: Setup, end: str) -> None:
    worker = await setup.worker()
    slow = {"body_seconds": 1.0 if end == "too slow" else 30}
    front = await setup.front(worker, limits={"bodies": 1_000_000, "body": 900_000}, timeouts=slow)
    counted = front.app.board.cell("bytes of bodies")
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(HEAD + CHUNK * 20)
    await until(lambda: 20 * 0x8000 - (1 << 16) <= counted.total() <= 20 * 0x8000)
    other, sender = await asyncio.open_connection("127.0.0.1", front.port)
    sender.write(HEAD + CHUNK * 20)
    async with asyncio.timeout(5):
        assert b" 429 " in await other.readline(), "in the middle of it, since the two are too large together"
    sender.close()
    await until(lambda: len(front.app.proxy.active) == 1)
    assert counted.total() <= 20 * 0x8000, "what was refused has been given back"
    if end == "leaves":
        writer.transport.abort()
    elif end != "too slow":
        writer.write(CHUNK * 10)
    await until(lambda: not front.app.proxy.active)
    assert counted.total() == 0 and not worker.seen
    writer.close()


async def test_a_body_of_known_length_counts_before_it_comes(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, limits={"bodies": 1_000_000})
    counted = front.app.board.cell("bytes of bodies")
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 800000\r\n\r\n" + b"x" * 200_000)
    await until(lambda: counted.total() > 0)
    assert counted.total() == 800_000
    await error_of(await front.chat(x="x" * 300_000), 429, "overloaded")
    writer.close()
    await until(lambda: not front.app.proxy.active)
    assert counted.total() == 0


async def test_a_body_is_forgotten_when_its_request_fails(setup: Setup) -> None:
    """An error that the exchange keeps holds the exchange by its traceback, until the garbage is collected."""
    worker = await setup.worker()
    worker.answer = silent
    front = await setup.front(worker, timeouts={"first_byte_seconds": 0.3})
    request = asyncio.create_task(front.chat(x="x" * 100_000))
    await until(lambda: bool(worker.seen))
    (exchange,) = front.app.proxy.active
    assert exchange.ask is not None and len(exchange.ask.body.raw) > 100_000
    await error_of(await request, 504, "worker_timeout")
    assert exchange.ask.body.raw == b"" and front.app.board.cell("bytes of bodies").total() == 0


@given(st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=200))
def test_turns_starve_nobody_and_keep_the_order(rounds: list[set[int]]) -> None:
    """Whoever waits all the time is served at least as often as its weight says, but for one round of all."""
    turns, served, since = Turns(), Counter[int](), dict.fromkeys(range(3), 0)
    for number, lines in enumerate(rounds):
        for priority in set(range(3)) - lines:
            since[priority] = number + 1
        chosen = turns.order(lines)
        assert sorted(chosen) == sorted(lines)
        turns.took(chosen[0])
        served[chosen[0]] += 1
        for priority, longest in enumerate((2, 6, 22)):
            if chosen[0] == priority:
                since[priority] = number + 1
            assert number + 1 - since[priority] < longest


def test_shares_under_lasting_overload() -> None:
    turns, served = Turns(), Counter[int]()
    for _ in range(2100):
        first = turns.order({0, 1, 2})[0]
        turns.took(first)
        served[first] += 1
    assert [served[priority] for priority in range(3)] == [1600, 400, 100]


class Counted:
    """As much of a worker as waiting needs."""

    def __init__(self, board: Board) -> None:
        self.outstanding, self.pace = board.cell("outstanding"), Pace()


def any_worker() -> None:
    """Where workers are as good as each other."""


class Places:
    """Workers of a process that shares its board, with places that the test gives back."""

    def __init__(self, board: Board, most: int) -> None:
        self.worker: Any = Counted(board)
        self.most = most
        self.waiting = Waiting(
            Queue(), board, lambda model, priority: [self.worker], self._free, self._reserve, self.free
        )
        self.waiting.random = random.Random(board.row)

    def _who(self, model: str | None, priority: int) -> list[Worker]:
        return [self.worker]

    def _free(self, worker: Worker) -> bool:
        return worker.outstanding.total() < self.most

    def _reserve(self, worker: Worker) -> bool:
        worker.outstanding.add(1)
        if worker.outstanding.total() <= self.most:
            return True
        worker.outstanding.add(-1)
        return False

    def free(self, worker: Worker) -> None:
        worker.outstanding.add(-1)
        self.waiting.fill(worker)


@pytest.mark.parametrize("lines", [(30, 30), (45, 15), (60, 0)])
async def test_processes_share_by_who_waits_where(lines: tuple[int, int]) -> None:
    """All places become free in the first process; each line still gets about the share that it has of all."""
    shared = Board.share(2)
    boards = [shared, Board(2, 1, shared.descriptor)]
    both = [Places(board, 4) for board in boards]
    order: list[int] = []

    async def request(at: int) -> None:
        worker = await both[at].waiting.wait("m", 1, any_worker)
        order.append(at)
        worker.outstanding.add(-1)  # the place moves to the first process, as if it had always been its own
        both[0].worker.outstanding.add(1)
        await asyncio.sleep(0.005)
        assert shared.cell("outstanding").total() <= 4
        both[0].free(both[0].worker)

    for _ in range(4):
        assert both[0]._reserve(both[0].worker)
    tasks = [asyncio.create_task(request(at)) for at in (0, 1) for _ in range(lines[at])]
    await asyncio.sleep(0.01)
    for _ in range(4):
        both[0].free(both[0].worker)
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)
    first_half = Counter(order[: sum(lines) // 2])
    share = lines[1] / sum(lines)
    assert abs(first_half[1] / (sum(lines) // 2) - share) <= 0.34
    assert shared.cell("waiting").total() == 0 and shared.cell("outstanding").total() == 0


async def test_a_place_that_other_processes_cannot_use_is_taken() -> None:
    """Two processes have somebody in line; the second one never looks, as if it thought the worker unready."""
    shared = Board.share(2)
    here = Places(shared, 1)
    Board(2, 1, shared.descriptor).cell("waiting interactive m").add(1000)
    assert here._reserve(here.worker)
    task = asyncio.create_task(here.waiting.wait("m", 0, any_worker))
    await asyncio.sleep(0)
    here.free(here.worker)
    async with asyncio.timeout(2):
        assert await task is here.worker


steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 2), st.sampled_from("mn")),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just("")),
        st.tuples(st.just("finish"), st.integers(0, 30), st.just("")),
    ),
    max_size=40,
)


@given(steps=steps, most=st.integers(1, 3))
def test_whatever_happens_no_place_is_lost_or_given_twice(steps: list[tuple[str, int, str]], most: int) -> None:
    """Requests come, go away and finish in any order, some in one moment; then nobody waits beside a free place, each
    line was served in its order, and in the end all counters are zero."""

    async def play() -> None:
        board = Board()
        here = Places(board, most)
        waits: dict[asyncio.Task[Any], tuple[int, str]] = {}
        inside: list[asyncio.Task[Any]] = []
        served: dict[tuple[int, str], list[int]] = {}
        names: dict[asyncio.Task[Any], int] = {}
        for number, (what, which, model) in enumerate(steps):
            if what == "arrive":
                task = asyncio.create_task(here.waiting.wait(model, which, any_worker))
                waits[task], names[task] = (which, model), number
            elif what == "leave" and waits:
                list(waits)[which % len(waits)].cancel()
            elif what == "finish" and inside:
                inside.pop(which % len(inside))
                here.free(here.worker)
            if number % 3 and number + 1 < len(steps):
                continue  # the next step comes in the same moment
            for _ in range(4):
                await asyncio.sleep(0)
            for task in [task for task in waits if task.done()]:
                line = waits.pop(task)
                if not task.cancelled():
                    inside.append(task)
                    served.setdefault(line, []).append(names[task])
            assert here.worker.outstanding.total() == len(inside) <= most
            assert here.waiting.count == len(waits) == board.cell("waiting").total()
            assert not waits or len(inside) == most
        assert all(order == sorted(order) for order in served.values())
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        for _ in inside:
            here.free(here.worker)
        assert here.worker.outstanding.total() == board.cell("waiting").total() == 0
        assert set(here.waiting.counts().values()) <= {0}

    asyncio.run(play())


def test_retry_after_is_what_the_pace_says() -> None:
    assert retry_after(10, 2.0, 30.0) == (("Retry-After", "5"),)
    assert retry_after(1, 50.0, 30.0) == (("Retry-After", "1"),)
    assert retry_after(1, 0.0, 29.5) == (("Retry-After", "30"),)
    assert retry_after(10**9, 0.1, 30.0) == (("Retry-After", "600"),)


async def test_no_candidate_is_told_before_waiting() -> None:
    def none(model: str | None, priority: int) -> list[Worker]:
        raise ApiError(Kind.NOT_READY, "nobody")

    waiting = Waiting(
        Queue(wait_seconds=0.05), Board(), none, lambda worker: True, lambda worker: True, lambda worker: None
    )
    with pytest.raises(ApiError, match="nobody"):
        await waiting.wait("m", 1, any_worker)
    assert waiting.count == 0
