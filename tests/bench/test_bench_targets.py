"""Holding a run against its targets: the arithmetic of each measure, what counts as unknown, the line at the end."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from syshaxd.bench import suite
from syshaxd.bench.limits import FIELDS
from syshaxd.bench.moe import SHAPES
from syshaxd.bench.targets import OF_POINTS, OF_STEPS, Target, judge, last_line, read_targets

POINT = {
    "shape": "qwen3-30b-a3b",
    "format": "q8_0",
    "threads": 2,
    "tokens": 1,
    "ms": 1.0,
    "weight_gb_s": 45.0,
    "gflop_s": 90.0,
    "weight_bytes": 45_000_000,
    "operations": 90_000_000,
    "limit": "read",
    "limits": {"read_gb_s": 50.0, "int8_gop_s": 1000.0},
}


def run_of(*points: dict[str, Any], peers: tuple[dict[str, Any], ...] = (), steps: Any = ()) -> dict[str, Any]:
    return {"points": [{**POINT, **point} for point in points], "peers": list(peers), "steps": list(steps)}


def value_of(target: Target, run: dict[str, Any]) -> float:
    verdicts, unknown = judge([target], run)
    assert len(verdicts) == 1 and not unknown
    return verdicts[0].value


def test_shares() -> None:
    run = run_of({})
    assert value_of(Target("t", "read_share", 0.92), run) == pytest.approx(0.9)
    assert value_of(Target("t", "peak_share", 0.65), run) == pytest.approx(0.09)


def peer(**changes: Any) -> dict[str, Any]:
    same = {key: POINT[key] for key in ("shape", "threads", "tokens")}
    return {"peer": "a", "format": "int8", "width": 8, "ms": 1.0, **same, **changes}


def test_the_fastest_peer_of_the_same_width_and_point_counts() -> None:
    others = (peer(ms=3.0), peer(ms=2.0), peer(ms=0.1, width=4), peer(ms=0.1, threads=1), peer(ms=0.1, tokens=2))
    target = Target("t", "against_peers", 1.0)
    assert value_of(target, run_of({}, peers=others)) == pytest.approx(2.0)
    named = Target("t", "against_peers", 1.0, peers=("b",))
    assert value_of(named, run_of({}, peers=(*others, peer(ms=5.0, peer="b")))) == pytest.approx(5.0)
    assert judge([target], run_of({})) == ([], ["t"])


def test_a_dip_is_held_against_the_rate_that_the_format_reached() -> None:
    dip = {"tokens": 16, "ms": 4.0, "weight_bytes": 50_000_000, "operations": 800_000_000, "gflop_s": 200.0}
    best = {"tokens": 256, "gflop_s": 400.0}
    other = {"tokens": 256, "gflop_s": 9000.0, "threads": 1}
    target = Target("t", "no_dip", 0.87, tokens=(16,))
    assert value_of(target, run_of(dip, best, other)) == pytest.approx(0.5)  # 2 ms by operations, 1 ms by bytes
    assert value_of(target, run_of({**dip, "weight_bytes": 180_000_000}, best)) == pytest.approx(0.9)


def test_two_threads_count_where_computing_is_the_limit() -> None:
    one, two = {"threads": 1, "tokens": 256, "ms": 19.0}, {"threads": 2, "tokens": 256, "ms": 10.0, "limit": "int8"}
    target = Target("t", "two_threads", 1.8, threads=(2,))
    assert value_of(target, run_of(one, two)) == pytest.approx(1.9)
    assert judge([target], run_of(one, {**two, "limit": "read"})) == ([], ["t"])
    assert judge([target], run_of(two)) == ([], ["t"])


def test_steps() -> None:
    step = {"shape": POINT["shape"], "format": "q8_0", "threads": 2, "layers": 3, "ms": 2.0}
    run = run_of(steps=(step,), peers=(peer(peer="llama.cpp", format="q8_0", ms=1.0),))
    assert value_of(Target("t", "step_against_llama", 1.2), run) == pytest.approx(1.5)
    assert judge([Target("t", "step_against_llama", 1.2)], run_of(steps=(step,))) == ([], ["t"])


def test_the_line_names_what_falls_short_and_what_is_unknown() -> None:
    targets = [
        Target("reads", "read_share", 0.92),
        Target("computes", "peak_share", 0.05),
        Target("x", "no_dip", 9, (), ("y",)),
    ]
    verdicts, unknown = judge(targets, run_of({}, {"tokens": 2, "weight_gb_s": 49.0}))
    line = last_line(verdicts, unknown)
    assert "\n" not in line and "1 of 4" in line and "reads (1, worst 0.90 of 0.92" in line
    assert "computes" not in line and line.endswith("not measured: x")
    verdicts, unknown = judge(targets[1:2], run_of({}))
    assert last_line(verdicts, unknown) == "bench: nothing falls short in 1 comparisons"


def test_the_table_speaks_of_what_is_measured() -> None:
    targets = read_targets()
    assert len({target.name for target in targets}) == len(targets)
    for target in targets:
        assert target.measure in OF_POINTS or target.measure in OF_STEPS
        assert target.at_least > 0
        assert set(target.shapes) <= set(SHAPES)
        assert set(target.formats) <= {*suite.FORMATS, "int8row"}
        assert set(target.tokens) <= set(suite.TOKENS)


def test_mistakes_in_the_table_are_found(tmp_path: Path) -> None:
    file = tmp_path / "targets.toml"
    file.write_text('[[target]]\nname = "a"\nmeasure = "read_share"\nat_leest = 1.0\n')
    with pytest.raises(TypeError, match="at_leest"):
        read_targets(file)


def test_judging_changes_nothing() -> None:
    run = run_of({}, {"tokens": 16}, peers=(peer(),))
    before = copy.deepcopy(run)
    judge(read_targets(), run)
    assert run == before and FIELDS["read"] in run["points"][0]["limits"]
