"""`syshaxd bench limits`: sane figures, the arithmetic of shares, and limits that benchmarks raise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from syshaxd import _core
from syshaxd.bench import limits
from syshaxd.bench.app import app
from syshaxd.bench.limits import FIELDS, LimitMeter, share_of_limit
from syshaxd.bench.moe import make_bench_plan
from syshaxd.core import compiled_core

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "last_level_cache_bytes", lambda cpus: 1 << 17)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["limits", "--seconds", "0.02", *arguments])


def test_figures(small_caches: None) -> None:
    """All limits are there and in the order that arithmetic on any CPU has; loops are listed best first."""
    affinity = os.sched_getaffinity(0)
    done = bench("--threads", "1", "--json")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["threads"] == 1 and record["isa"] == _core.isa_effective()
    assert record["read_gb_s"] > 0.1 and record["fp32_gflop_s"] > 0.1
    assert record["bf16_gflop_s"] >= record["fp32_gflop_s"]
    assert record["int4_gop_s"] >= record["int8_gop_s"] > 0.1
    for limit, field in FIELDS.items():
        loops = list(record["loops"][limit].values())
        assert loops and loops == sorted(loops, reverse=True)
        assert record[field] >= loops[0]
        assert any(record["winners"][limit] in found for found in record["loops"].values())
    shared = record["loops"]["fp32"].keys() & record["loops"]["bf16"].keys()
    assert shared and all(record["loops"]["fp32"][loop] == record["loops"]["bf16"][loop] for loop in shared)
    assert os.sched_getaffinity(0) == affinity


def test_a_cap_leaves_the_weaker_loops(small_caches: None) -> None:
    record = json.loads(bench("--threads", "1", "--isa", "scalar", "--json").stdout)
    assert all(loop.startswith("portable") for found in record["loops"].values() for loop in found)


def test_a_table_by_default(small_caches: None) -> None:
    done = bench("--threads", "1")
    assert done.exit_code == 0, done.stderr
    assert "int8_gop_s" in done.stdout


def test_two_threads_compute_more_than_one(small_caches: None) -> None:
    """Best of many short repetitions, so that it holds on a busy machine too."""
    core = compiled_core()
    threads, factor = (2, 1.2) if len(CPUS) > 1 else (1, 0.8)
    one, two = (LimitMeter(core, make_bench_plan(core, number)) for number in (1, threads))
    for _ in range(20):
        for meter in (one, two):
            meter.measure(["fp32"], 0.05)
        if two.best("fp32")[0] > factor * one.best("fp32")[0]:
            return
    pytest.fail(f"{two.best('fp32')} with two threads, {one.best('fp32')} with one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--threads", "4000"], "4000"), (["--isa", "mmx"], "mmx"), (["--seconds", "-1"], "seconds")],
    ids=str,
)
def test_mistakes_end_with_a_message(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code not in (0, 1) and message in done.stderr and "Traceback" not in done.stderr


def test_the_core_refuses_nonsense() -> None:
    plan = {"node": -1, "cpus": [], "threads": 1, "share": 1.0}
    with pytest.raises(_core.CoreError, match="bytes"):
        _core.LimitBench([plan], "", 0, 0)
    meter = _core.LimitBench([plan], "", 0, 1 << 20)
    with pytest.raises(_core.CoreError, match='"fp64" is no limit'):
        meter.measure("fp64", 0.0)
    with pytest.raises(_core.CoreError, match="seconds"):
        meter.measure("fp32", float("nan"))


positive = st.floats(1e-3, 1e6)


@given(ms=positive, read=positive, peak=positive, weight_bytes=positive, operations=positive)
def test_share_of_limit(ms: float, read: float, peak: float, weight_bytes: float, operations: float) -> None:
    """The slower of reading and computing, as a part of the time measured."""
    limits_now = {"read_gb_s": read, "int8_gop_s": peak}
    share, name = share_of_limit(ms, weight_bytes * 1e6, operations * 1e6, "int8", limits_now)
    reading, computing = weight_bytes / read, operations / peak
    assert share * ms == pytest.approx(max(reading, computing))
    assert name == ("read" if reading >= computing else "int8") or reading == pytest.approx(computing)


def test_a_layer_that_reads_40_of_50_gb_s() -> None:
    limits_now = {"read_gb_s": 50.0, "fp32_gflop_s": 100.0}
    assert share_of_limit(1.0, 40e6, 20e6, "fp32", limits_now) == (pytest.approx(0.8), "read")
    assert share_of_limit(1.0, 4e6, 90e6, "fp32", limits_now) == (pytest.approx(0.9), "fp32")


def test_benchmarks_raise_limits(small_caches: None) -> None:
    core = compiled_core()
    meter = LimitMeter(core, make_bench_plan(core, 1))
    meter.measure(["fp32"], 0.0)
    loops = meter.best("fp32")
    assert not meter.raise_to("fp32", loops[0] / 2, "slow")
    assert meter.best("fp32") == loops
    assert meter.raise_to("fp32", loops[0] * 2, "fast")
    assert meter.best("fp32") == (loops[0] * 2, "fast")
    assert meter.best("bf16") == (loops[0] * 2, "fast"), "bf16 can always be widened"
    assert meter.record()["winners"]["fp32"] == "fast"


def lay_out_cache(root: Path, cpu: int, level: int, size: str, shared: str) -> None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}"
    folder.mkdir(parents=True)
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(text + "\n")


def test_last_level_caches_are_counted_once_each(tmp_path: Path) -> None:
    for cpu in range(4):
        lay_out_cache(tmp_path, cpu, 2, "512K", str(cpu))
        lay_out_cache(tmp_path, cpu, 3, "32768K", "0-1" if cpu < 2 else "2-3")
    assert limits.last_level_cache_bytes(frozenset({0, 1}), tmp_path) == 32 << 20
    assert limits.last_level_cache_bytes(frozenset({1, 2, 3}), tmp_path) == 64 << 20
    assert limits.last_level_cache_bytes(frozenset({9}), tmp_path) == 32 << 20
