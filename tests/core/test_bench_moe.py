"""`syshaxd bench moe`: what it promises to scripts, and the routing that makes its numbers honest."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from core_models import FORMATS
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from syshax.errors import InvalidArgumentError
from syshaxd.bench import limits, moe
from syshaxd.bench.app import app
from syshaxd.bench.routing import Routing


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "last_level_cache_bytes", lambda cpus: 1 << 17)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["moe", "--shape", "128x64x8x2", "--seconds", "0.02", *arguments])


@pytest.mark.parametrize("format", FORMATS)
def test_json_records(format: str) -> None:
    done = bench("--format", format, "--tokens", "1,16", "--threads", "1", "--json")
    assert done.exit_code == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["tokens"] for record in records] == [1, 16]
    for record in records:
        assert record.keys() >= {"tokens", "ms", "weight_gb_s", "gflop_s", "kernel"}
        assert record["kernel"].startswith(format + "_")
        assert record["ms"] > 0
        flop = 2 * 3 * 128 * 64 * record["tokens"] * 2
        assert record["gflop_s"] == pytest.approx(flop / record["ms"] / 1e6, rel=0.05, abs=0.01)
        assert record["layers"] * 8 * 3 * 128 * 64 >= 8 << 17 or format in ("bf16", "fp16")
        assert 0 < record["busy"] <= 1.05
        assert 0 < record["limit_share"] <= 1.001
        assert record["limit"] in ("read", limits.peak_of(format))
        assert record["limits"]["read_gb_s"] >= record["weight_gb_s"]
        assert all(0 < record["sustained"][name] <= limit for name, limit in record["limits"].items())
        assert record["sustained_share"] >= record["limit_share"]
        assert record["limits"][limits.FIELDS[limits.peak_of(format)]] >= record["gflop_s"]


def test_limits_can_be_left_out() -> None:
    done = bench("--tokens", "2", "--threads", "1", "--no-limits", "--json")
    record = json.loads(done.stdout)
    assert record["ms"] > 0
    assert record["limit_share"] is record["limit"] is record["limits"] is record["raised"] is None
    assert record["sustained"] is record["sustained_share"] is None


def test_a_table_by_default() -> None:
    done = bench("--tokens", "3", "--threads", "1")
    assert done.exit_code == 0, done.stderr
    assert "weights GB/s" in done.stdout
    assert "q8_0_q8_" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "128x64x8"], "128x64x8"),
        (["--shape", "qwen3"], "qwen3-30b-a3b"),
        (["--shape", "128x64x8x9"], "9 of 8 experts"),
        (["--format", "q3_k"], "q3_k"),
        (["--tokens", "1,,2"], "1,,2"),
        (["--tokens", "0"], '"0"'),
        (["--threads", "5000"], "4096"),
        (["--threads", "4000"], "4000"),
        (["--dtype", "int8"], "int8"),
        (["--isa", "mmx"], "mmx"),
        (["--shape", "1000000x1000000x512x8"], "GiB"),
    ],
    ids=str,
)
def test_mistakes_end_with_a_message(arguments: list[str], message: str) -> None:
    done = bench(*arguments)
    assert done.exit_code not in (0, 1), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@given(layers=st.integers(1, 3), experts=st.integers(1, 40), data=st.data())
def test_one_token_sees_all_experts_before_any_repeats(layers: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    routing = Routing(layers, experts, top_k, seed=experts)
    seen: dict[int, list[int]] = {layer: [] for layer in range(layers)}
    for _ in range(layers * 3 * -(-experts // top_k)):
        layer, ids = routing.next(1)
        assert len(set(ids[0])) == top_k
        seen[layer] += ids[0].tolist()
    for order in seen.values():
        for begin in range(0, len(order) - experts + 1, experts):
            assert set(order[begin : begin + experts]) == set(range(experts))


def test_tokens_choose_distinct_experts_anew_in_every_call() -> None:
    routing, same = Routing(2, 32, 4, seed=3), Routing(2, 32, 4, seed=3)
    first, second = routing.next(16)[1], routing.next(16)[1]
    assert first.shape == (16, 4)
    assert all(len(set(row)) == 4 for row in first)
    assert not np.array_equal(first, second)
    assert np.array_equal(first, same.next(16)[1])


def test_shapes() -> None:
    assert moe.parse_shape("qwen3-30b-a3b") == (2048, 768, 128, 8)
    assert moe.parse_shape("deepseek-v3") == (7168, 2048, 16, 8)
    assert moe.parse_shape("64x32x4x2") == (64, 32, 4, 2)
    with pytest.raises(InvalidArgumentError, match="64x32x4x-2"):
        moe.parse_shape("64x32x4x-2")
