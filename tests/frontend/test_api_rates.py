"""A key's requests per minute: never more in any 60 seconds, in all processes together; Retry-After is true."""

from __future__ import annotations

from pathlib import Path

import pytest
from front_fixtures import Setup, bearer, error_of, running_front, write_keys
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.frontend.board import Board
from syshaxd.frontend.keys import Window

moments = st.lists(st.tuples(st.floats(0, 1.5), st.integers(0, 2)), min_size=1, max_size=80)
"""Seconds to pass, then a request of process 0 or 1; 2: one of a process that takes 1's place."""


@given(gaps=moments, limit=st.integers(1, 8), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_never_more_in_any_minute(gaps: list[tuple[float, int]], limit: int, scale: float) -> None:
    """The reference counts the admitted requests of the last 60 s, one by one; notes by the second admit no more."""
    shared = Board.share(2)
    second = Board(2, 1, shared.descriptor)
    windows = [Window(board.counter("k")) for board in (shared, second)]
    now, ticked = 1000.5, 1000
    for window in windows:
        window.note(now)
    admitted: list[float] = []
    promised = 0.0
    for gap, process in gaps:
        past = windows[0].past()  # the new process learns it late
        now += gap * scale
        while ticked < int(now):
            ticked += 1
            for window in windows:
                window.note(float(ticked))
        if process == 2:
            process, windows[1] = 1, Window(second.counter("k"))
            windows[1].recall(*past, now)
        wait = windows[process].admit(limit)
        recent = [moment for moment in admitted if now - moment < 60]
        if wait == 0:
            assert len(recent) < limit
            admitted.append(now)
            promised = 0.0
        else:
            assert 1 <= wait <= 61 and len([m for m in admitted if now - m < 62]) >= limit
            promised = now + wait
    while ticked < int(promised):
        ticked += 1
        for window in windows:
            window.note(float(ticked))
    assert not promised or windows[0].admit(limit) == 0, "Retry-After named a moment when it is admitted"


def test_seconds_that_were_missed_are_caught_up() -> None:
    window = Window(Board().counter("k"))
    window.note(1000.0)
    assert window.admit(1) == 0
    assert window.admit(1) > 0
    window.note(1100.0)
    assert window.admit(1) == 0


async def test_a_key_over_its_rate_gets_429_and_a_moment(setup: Setup, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"slow": {"requests_per_minute": 3}, "free": {}})
    worker = await setup.worker()
    front = await setup.front(worker, keys=keys)
    assert [(await front.chat(key="slow")).status for _ in range(3)] == [200] * 3
    refused = await front.chat(key="slow")
    error = await error_of(refused, 429, "rate_limit_exceeded")
    assert error["type"] == "rate_limit_error" and "3 requests a minute" in error["message"]
    assert 55 <= int(refused.headers["Retry-After"]) <= 61
    assert (await front.chat(key="free")).status == 200 and len(worker.seen) == 4
    assert (await front.session.get("/v1/models", headers=bearer("slow"))).status == 200, "costs a worker nothing"


async def test_a_rate_holds_over_processes_and_reloads(setup: Setup, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"slow": {"requests_per_minute": 3}})
    worker = await setup.worker()
    shared = Board.share(2)
    async with (
        running_front(worker.url, keys=keys, board=shared) as one,
        running_front(worker.url, keys=keys, board=Board(2, 1, shared.descriptor)) as two,
    ):
        for front in (one, two):
            await front.until_ready(1)
        statuses = [(await front.chat(key="slow")).status for front in (one, two, one, two, one)]
        assert statuses == [200, 200, 200, 429, 429]
        assert one.app.keys is not None
        one.app.keys.reload()
        assert (await one.chat(key="slow")).status == 429


async def test_limits_requests_is_one_limit_for_all_processes(setup: Setup) -> None:
    worker = await setup.worker()
    shared = Board.share(2)
    second = Board(2, 1, shared.descriptor)
    async with running_front(worker.url, board=shared, limits={"requests": 1}) as front:
        await front.until_ready(1)
        assert (await front.chat()).status == 200
        second.cell("requests in progress").add(1)
        await error_of(await front.chat(), 429, "overloaded")
        second.cell("requests in progress").add(-1)
        assert (await front.chat()).status == 200


@pytest.mark.parametrize("status", ["429", "200"])
async def test_refused_requests_are_counted(setup: Setup, tmp_path: Path, status: str) -> None:
    keys = write_keys(tmp_path / "keys", {"slow": {"requests_per_minute": 1, "priority": "batch"}})
    front = await setup.front(await setup.worker(), keys=keys)
    for _ in range(2):
        await front.chat(key="slow")
    text = await (await front.session.get("/metrics", headers=bearer("slow"))).text()
    assert any(f'status="{status}"' in line and line.endswith(" 1.0") for line in text.splitlines()), text
