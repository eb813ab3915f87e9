"""The API benchmark: its load generator's arithmetic on known schedules, its worker, bare pass-through and verdict."""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.bench import api, api_load, api_report, api_wire, api_worker
from syshaxd.bench.api_load import percentile, schedule


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.floats(0, 1))
def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed(values: list[float], part: float) -> None:
    found = percentile(values, part)

    def enough(value: float) -> bool:
        return sum(other <= value for other in values) >= part * len(values)

    assert found in values and enough(found)
    assert not any(enough(other) for other in values if other < found)


@given(st.floats(1, 2000), st.floats(0.5, 20), st.integers(0, 2**32))
def test_a_schedule_is_even_in_the_large_and_random_in_the_small(rate: float, seconds: float, seed: int) -> None:
    moments = schedule(rate, seconds, seed)
    assert len(moments) == round(rate * seconds) and moments == sorted(moments)
    assert all(0 < moment < seconds for moment in moments)
    if len(moments) > 1000:
        half = bisect.bisect(moments, seconds / 2)
        assert abs(half - len(moments) / 2) < 6 * (len(moments) / 4) ** 0.5
        gaps = [late - early for early, late in pairwise(moments)]
        mean = sum(gaps) / len(gaps)
        assert 0.5 < sum(gap > mean for gap in gaps) / len(gaps) / 0.368 < 1.5, "exponential gaps"


class Stalling(asyncio.Protocol):
    """Answers at once but between `begin` and `end`: these requests get their answers at `end`."""

    def __init__(self, begin: float, end: float) -> None:
        self._stall = (begin, end)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        begin, end = self._stall
        now = time.perf_counter()
        late = end - now if begin <= now < end else 0.0
        asyncio.get_running_loop().call_later(late, self._transport.write, api_wire.COMPLETION)


async def test_a_server_that_stops_is_blamed_for_all_requests_that_should_have_come_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    rate, seconds = 100.0, 1.5
    begin = time.perf_counter() + 0.45
    end = begin + 0.5
    server = await loop.create_server(lambda: Stalling(begin, end), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    before = time.perf_counter()
    # With two connections only, those that are to leave in the stall need new ones: no answer is waited for.
    found = await api_load.open_loop(port, rate, seconds, seed=3, connections=2)
    server.close()
    assert not found["failed"] and len(found["latencies"]) == round(rate * seconds) == len(found["lateness"])
    start = before + 0.05  # as open_loop does, connecting aside
    moments = [start + after for after in schedule(rate, seconds, 3)]
    expected = sorted(end - moment for moment in moments if begin <= moment < end)
    assert len(expected) > 30, "the stall was long enough to mean something"
    slow = sorted(latency for latency in found["latencies"] if latency > 0.1)
    wanted = [latency for latency in expected if latency > 0.1]
    assert abs(len(slow) - len(wanted)) <= 4
    assert percentile(slow, 0.5) == pytest.approx(percentile(wanted, 0.5), abs=0.06)


async def test_moments_come_in_order_and_are_never_early() -> None:
    start = time.perf_counter()
    moments = [start + after for after in (0.0, 0.01, 0.0101, 0.02, 0.02, 0.031)]
    called: list[tuple[float, float]] = []
    await api_load.Timer(moments, lambda moment: called.append((moment, time.perf_counter()))).done.wait()
    assert [moment for moment, _ in called] == moments
    assert all(at >= moment for moment, at in called)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_messages_are_whole_when_all_their_bytes_are_there(body: bytes, cut: int) -> None:
    message = api_wire.answer(body)
    assert api_wire.whole_message(message[:cut]) == (len(message) if cut >= len(message) else 0)
    assert api_wire.whole_message(message + b"HTTP/1.1") == len(message)


def test_marks_stand_once_in_each_event() -> None:
    assert api_wire.EVENT.count(api_wire.EVENT_MARK) == 1
    assert api_wire.BLOCK.count(api_wire.EVENT_MARK) == api_wire.BLOCK_EVENTS
    assert api_wire.STREAM_HEAD.count(api_wire.EVENT_MARK) == 0
    body = json.loads(api_wire.request(stream=True, gap_ms=20).partition(b"\r\n\r\n")[2])
    assert body["model"] == api_wire.MODEL and body["gap_ms"] == 20


async def test_the_worker_answers_paces_and_floods() -> None:
    server = await api_worker.serve()
    port = api_worker.port_of(server)
    closed = await api_load.closed_loop([port], 2, 0.1, [])
    assert closed["per_second"] > 100 and not closed["failed"]
    paced = await api_load.streams(port, 5, 20.0, 0.6, [])
    assert paced["started"] == 5 and not paced["lost"] and not paced["silent"]
    assert 0.4 * 250 <= paced["events_per_second"] <= 1.2 * 250 and paced["gap_p50_ms"] >= 19
    flood = await api_load.streams(port, 2, 0.0, 0.2, [])
    assert flood["events_per_second"] > 20 * paced["events_per_second"]
    await api_worker.close(server)


def test_verdicts_and_the_last_line() -> None:
    targets = [
        {"name": "quick", "figure": "a", "at_most": 2.0, "beside": ["b"]},
        {"name": "much", "figure": "b", "at_least": 5.0},
        {"name": "not measured", "figure": "c", "at_least": 5.0},
    ]
    verdicts = api.judge(targets, {"a": 2.0, "b": 5})
    assert [verdict["met"] for verdict in verdicts] == [True, True] and verdicts[0]["beside"] == {"b": 5.0}
    assert api.last_line(verdicts) == "bench api: nothing falls short in 2 comparisons"
    verdicts = api.judge(targets, {"a": 2.1, "b": 4})
    assert [verdict["met"] for verdict in verdicts] == [False, False]
    line = api.last_line(verdicts)
    assert line == "bench api: 2 of 2 comparisons fall short: quick: 2.1, at most 2; much: 4, at least 5"


def test_every_target_of_the_table_can_be_judged() -> None:
    rows = api.read_targets()
    assert len(rows) >= 9
    for row in rows:
        assert set(row) <= {"name", "figure", "at_most", "at_least", "beside"} and ("at_most" in row) != (
            "at_least" in row
        )


def test_a_whole_run(tmp_path: Path) -> None:
    """Short, and nothing is said of its figures; every other one of the table is there."""
    document = api.run(["closed", "paced"], api.Plan(1, 0.2, 0.2, 1), lambda line: None)
    judged = {verdict["target"] for verdict in document["verdicts"]}
    assert len(judged) == 2 and document["line"].startswith("bench api: ")
    for name in ("bare", "ours"):
        assert document["figures"][f"{name}_requests"] > 10
        assert document["figures"][f"{name}_paced_cpu_us"] > 1
    assert document["figures"]["paced_started"] == 1.0
    assert api_report.write(document, tmp_path)[0].suffix == ".json"
    assert api_report.table(document).row_count == 2
