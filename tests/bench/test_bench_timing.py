"""Timing on machines that others use too: what counts as quiet, and which samples the medians come from."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.bench import timing
from syshaxd.bench.timing import OtherLoad, Sample, chosen, machine_seconds, summary, time_calls


def test_machine_seconds() -> None:
    stat = "cpu  100 20 3 9999 500 6 70 800 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert machine_seconds(stat) == pytest.approx(9.99)


def sample(others: float, *seconds: float) -> Sample:
    return Sample(seconds, tuple(8.0 for _ in seconds), others)


def test_quiet_samples_count_alone() -> None:
    samples = [sample(0.0, 1.0), sample(1.5, 9.0), sample(0.1, 2.0), sample(0.0, 3.0), sample(0.9, 8.0)]
    result = summary(samples)
    assert result.seconds == 2.0 and result.quiet and result.calls == 5 and result.shortest == 1.0
    assert result.touched_per_second == pytest.approx(4.0)
    assert result.others == pytest.approx(0.5)


def test_without_quiet_samples_the_least_disturbed_third_counts() -> None:
    samples = [sample(others, seconds) for others, seconds in [(1.0, 5.0), (0.5, 2.0), (0.6, 4.0), (2.0, 9.0)] * 2]
    result = summary(samples)
    assert result.seconds == 2.0 and not result.quiet


@given(st.lists(st.floats(0, 4), min_size=1, max_size=20))
def test_some_sample_is_always_chosen(loads: list[float]) -> None:
    samples = [sample(load, 1.0) for load in loads]
    used = chosen(samples)
    assert used and max(one.others for one in used) <= max(loads)
    left_out = [one.others for one in samples if one not in used]
    assert all(others >= max(one.others for one in used) or others > timing.QUIET_CPUS for others in left_out)


def test_own_work_is_not_the_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(10.0, 1.0, 100.0), (13.0, 2.0, 102.0)])  # CPU seconds of all, of this process, wall clock
    monkeypatch.setattr(OtherLoad, "_read", staticmethod(lambda: next(readings)))
    assert OtherLoad().cpus() == pytest.approx(1.0)


@pytest.mark.parametrize(("seconds", "fewest"), [(0.001, 5), (0.2, 3)])
def test_calls_are_enough_for_a_median(seconds: float, fewest: int) -> None:
    calls = 0

    def call() -> tuple[float, float]:
        nonlocal calls
        calls += 1
        time.sleep(seconds)
        return seconds, 4.0

    result = time_calls(call, 0.0)
    assert fewest <= result.calls < calls
    assert result.seconds == seconds and result.touched == 4.0 and result.touched_per_second == 4.0 / seconds


def test_more_is_measured_while_it_is_not_quiet_but_not_for_ever() -> None:
    quiet, busy = sample(0.0, 1.0), sample(1.0, 1.0)
    assert not timing.enough([], 9.0, 1.0, 1) and not timing.enough([quiet] * 5, 0.9, 1.0, 1)
    assert timing.enough([quiet] * 5, 1.1, 1.0, 5) and not timing.enough([quiet] * 4, 1.1, 1.0, 5)
    assert not timing.enough([quiet, quiet, busy], 1.1, 1.0, 1) and timing.enough([quiet] * 3 + [busy], 1.1, 1.0, 1)
    assert not timing.enough([busy] * 9, 2.9, 1.0, 1) and timing.enough([busy] * 9, 3.1, 1.0, 1)
