"""`syshaxd bench all` on tiny layers: document, plot, exit status; peers that are absent, crash or chatter."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from syshaxd.bench import comparison, limits, reports, step, suite
from syshaxd.bench.app import app
from syshaxd.bench.comparison import Comparison, ending, parsed
from syshaxd.bench.moe import make_bench_plan
from syshaxd.bench.peers import PEERS, Peer, PeerFormat
from syshaxd.bench.peers.__main__ import measure
from syshaxd.bench.targets import Target, judge
from syshaxd.core import compiled_core

SHAPE = "128x64x8x2"


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "last_level_cache_bytes", lambda cpus: 1 << 17)


def bench_all(folder: Path, *arguments: str) -> Any:
    common = ["all", "--shapes", SHAPE, "--formats", "q4_0", "--tokens", "1,4", "--threads", "1", "--no-peers"]
    return CliRunner().invoke(app, [*common, "--seconds", "0.02", "--output", str(folder), *arguments])


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything lands in one document; the last line and the exit status say what falls short."""
    target = Target("reads", "read_share", 9.0, tokens=(1,))
    monkeypatch.setattr(suite, "read_targets", lambda: [target])
    done = bench_all(tmp_path / "new")
    assert done.exit_code == 1, done.output
    (record,) = (tmp_path / "new").glob("*.json")
    document = json.loads(record.read_text())
    assert document["complete"] and document["machine"]["features"] and document["machine"]["cpus"]
    assert [point["tokens"] for point in document["points"]] == [1, 4]
    assert [one["threads"] for one in document["limits"]] == [1]
    assert [one["format"] for one in document["steps"]] == ["q4_0"]
    assert document["ring"]["spin_us_p50"] > 0 and document["peers"] == []
    assert [verdict["met"] for verdict in document["verdicts"]] == [False]
    assert 0 <= document["quiet_part"] <= 1
    assert done.stdout.rstrip().splitlines()[-1] == document["line"]
    verdicts, _ = judge([replace(target, at_least=0.0)], document)
    assert [verdict.met for verdict in verdicts] == [True]


def test_an_interrupted_run_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "measure", interrupted)
    done = bench_all(tmp_path)
    assert done.exit_code == 1, done.output
    (record,) = tmp_path.glob("*.json")
    document = json.loads(record.read_text())
    assert not document["complete"] and len(document["points"]) == 2 and document["ring"] == {}
    assert done.stdout.rstrip().endswith("interrupted")


def test_nothing_falls_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"started": "2026-01-01T00:00:00Z", "peers_absent": {"a b": "not installed"}, "line": "bench: nothing"}
    document |= {"quiet": False, "quiet_part": 0.5, "falls_short": False, "points": [], "peers": [], "machine": {}}
    monkeypatch.setattr(suite, "run", lambda options, say: document)
    monkeypatch.setattr(reports, "plot", lambda document, file: None)
    done = bench_all(tmp_path)
    assert done.exit_code == 0 and done.stdout.endswith("bench: nothing\n")
    assert "no comparison with a b: not installed" in done.stdout and "only 50% of the figures" in done.stdout


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = bench_all(tmp_path / "file")
    assert done.exit_code not in (0, 1) and "cannot be written" in done.stderr and "Traceback" not in done.output


def test_a_quick_run_measures_fewer_points() -> None:
    full, quick = suite.Options(), suite.Options(quick=True)
    for shape in full.shapes:
        for threads in full.threads:
            assert set(quick.points(shape, threads)) <= set(full.points(shape, threads)) == set(suite.TOKENS)
            assert set(quick.peer_points(shape, threads)) <= set(quick.points(shape, threads))
            assert 1 in quick.peer_points(shape, threads)


def test_a_step_goes_through_ring_and_layers() -> None:
    core = compiled_core()
    record = step.measure(core, make_bench_plan(core, 1), "q8_0", 0.02, SHAPE)
    assert record["layers"] == step.LAYERS and record["ms"] >= record["ms_min"] > 0 and record["calls"] >= 1


class PlotLibrary:
    """Takes every call that draws; keeps what was labelled."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        if options.get("label"):
            self.labels.append(options["label"])
        return self

    def __getitem__(self, index: int) -> Any:
        return self

    def subplots(self, *args: Any, **options: Any) -> Any:
        return self, self


def test_the_plot_shows_every_format_and_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    library = PlotLibrary()
    monkeypatch.setattr(reports.importlib, "import_module", lambda name: library)
    point = {"shape": SHAPE, "threads": 1, "tokens": 1, "ms": 1.0, "limit_share": 0.5, "limit": "read"}
    points = [{**point, "format": format, "tokens": count} for format in ("bf16", "q4_0") for count in (1, 16)]
    peers = [{**point, "peer": "llama.cpp", "format": "q4_0", "width": 4}]
    machine = {"cpu": "a CPU", "isa": "avx2"}
    document = {"points": points, "peers": peers, "machine": machine, "started": "2026-01-01", "quiet": True}
    reports.plot(document, Path("x.png"))
    assert sorted(library.labels) == ["bf16", "bf16", "llama.cpp q4_0", "q4_0", "q4_0"]


def test_absent_peers_say_why_and_are_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SYSHAX_PEER_GGML", str(tmp_path))
    only = {"llama.cpp": PEERS["llama.cpp"]}
    monkeypatch.setattr(comparison, "PEERS", only)
    found = Comparison()
    found.run(4, SHAPE, 1, [1], 0.01)
    assert found.records == [] and "holds no libggml-base.so" in found.absent["llama.cpp q4_0"]
    monkeypatch.setattr(comparison.subprocess, "run", None)
    found.run(4, SHAPE, 1, [1], 0.01)


def test_what_libraries_print_is_passed_over() -> None:
    assert parsed('hello\n{"ms": 1.5}\n{broken\n{"absent": "x"}\n') == [{"ms": 1.5}, {"absent": "x"}]
    assert ending(0, "noise") == ""
    assert "SIGILL" in ending(-4, "") and "lacks instructions" in ending(-4, "")
    assert ending(3, "first\nlast\n") == "last" and ending(3, "") == "ended with status 3"


def test_a_peer_is_timed_over_distinct_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[npt.NDArray[Any]] = []

    class Layer:
        def prepare(self, hidden_states: npt.NDArray[Any]) -> None:
            assert hidden_states.shape == (3, 128) and hidden_states.dtype == np.float32

        def run(self, topk_ids: npt.NDArray[Any]) -> None:
            assert topk_ids.shape == (3, 2) and topk_ids.dtype == np.int32
            seen.append(topk_ids)

    module = ModuleType("syshaxd.bench.peers.fake")
    module.load = lambda format, shape, threads: Layer()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(PEERS, "fake", Peer("a fake", "fake", {"q": PeerFormat(8, 1.0)}))
    (record,) = measure("fake", "q", SHAPE, 1, [3], 0.01)
    assert record["width"] == 8 and record["tokens"] == 3 and record["ms"] > 0
    assert len(seen) > 5 and not all((ids == seen[0]).all() for ids in seen)
