"""`syshaxd bench sessions` on a small shape: the figures are there and make sense; verdicts can be lost."""

from __future__ import annotations

import pytest

from syshax.errors import InvalidArgumentError
from syshaxd.bench import sessions
from syshaxd.core import compiled_core

SHAPE = "512x256x64x4"


def test_figures_of_a_small_layer() -> None:
    with sessions.SessionsBench(compiled_core(), "q8_0", SHAPE) as bench:
        fairness = bench.fairness(0.4, long_tokens=512, long_requests=4)
        sharing = bench.sharing(0.6, tokens=16)
    assert 0 < fairness["alone_p50_ms"] <= fairness["alone_p99_ms"]
    assert 0 < fairness["beside_p50_ms"] <= fairness["beside_p99_ms"]
    assert 0.2 < fairness["throughput"] < 5
    assert sharing["together"] > 0 and sharing["after_each_other"] > 0 and sharing["possible"] > 0
    assert sharing["batched"] > 0.3, "replicas in the same layers hardly ever meet"


def test_a_bad_figure_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_P99_RATIO", 0.0)
    monkeypatch.setattr(sessions, "SLICE_MS", 0.0)
    monkeypatch.setattr(sessions, "LEAST_THROUGHPUT", 100.0)
    monkeypatch.setattr(sessions, "LEAST_GAIN", 100.0)
    monkeypatch.setattr(sessions, "LEAST_OF_POSSIBLE", 100.0)
    with sessions.SessionsBench(compiled_core(), "q8_0", SHAPE) as bench:
        fairness, sharing = bench.fairness(0.2, long_tokens=64, long_requests=2), bench.sharing(0.2, tokens=8)
    assert len(fairness["falls_short"]) == 2 and len(sharing["falls_short"]) == 1


def test_one_cpu_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    with pytest.raises(InvalidArgumentError, match="two CPUs"):
        sessions.SessionsBench(compiled_core(), "q8_0", SHAPE)
