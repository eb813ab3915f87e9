"""`syshaxd bench all`: every benchmark in one run, so that its figures may be compared with each other.

Owns what is measured and in which order, and the document that comes of it. Ours and the peers' figures of one width
are taken one after the other; limits are measured between them.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from syshaxd.bench import limits, moe, ring, step
from syshaxd.bench.comparison import Comparison
from syshaxd.bench.limits import LimitMeter
from syshaxd.bench.peers import WIDTH_OF_FORMAT
from syshaxd.bench.targets import judge, last_line, read_targets
from syshaxd.core import Core, core_errors
from syshaxd.machine import meminfo
from syshaxd.planner import Plan

FORMATS = ("bf16", "fp16", "q8_0", "q4_0")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
QUICK_TOKENS: Mapping[tuple[str, int], Sequence[int]] = {
    ("deepseek-v3", 1): (1, 16),
    ("deepseek-v3", 2): (1, 4, 16, 64, 1024),
}
"""By shape and threads; a layer of DeepSeek-V3 computes for seconds."""
PEER_TOKENS, QUICK_PEER_TOKENS = (1, 2, 4, 8, 16, 32, 64, 1024), (1, 16, 64)
FORMAT_VERSION = 1
"""Of the document."""


@dataclass(frozen=True)
class Options:
    shapes: Sequence[str] = tuple(moe.SHAPES)
    formats: Sequence[str] = FORMATS
    tokens: Sequence[int] = TOKENS
    threads: Sequence[int] = (1, 2)
    seconds: float = 1.0
    quick: bool = False
    peers: bool = True
    operators: Sequence[str] = ()
    """Paths of operator libraries, whose formats may be measured too."""

    def points(self, shape: str, threads: int) -> list[int]:
        few = QUICK_TOKENS.get((shape, threads), self.tokens) if self.quick else self.tokens
        return [count for count in self.tokens if count in few]

    def peer_points(self, shape: str, threads: int) -> list[int]:
        """Prefill of a slow peer takes minutes: in a quick run only what decides."""
        wanted = QUICK_PEER_TOKENS if self.quick else PEER_TOKENS
        return [count for count in self.points(shape, threads) if count in wanted]


def describe_machine(core: Core, plan: Plan) -> dict[str, Any]:
    """What the figures belong to."""
    any_core = cast(Any, core)
    return {
        "cpu": any_core.cpu_name(),
        "features": any_core.cpu_features(),
        "isa": any_core.isa_effective(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "cpus": sorted(plan.allowed_cpus),
        "nodes": len(plan.nodes),
        "last_level_cache_bytes": limits.last_level_cache_bytes(frozenset(plan.allowed_cpus)),
        "memory_bytes": meminfo().get("MemTotal", 0),
        "virtual": "hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
    }


class Suite:
    """One run. `say` is called with a line for people after each step."""

    def __init__(self, core: Core, options: Options, say: Callable[[str], None]) -> None:
        self._core, self._options, self._say = core, options, say
        self._plans = {threads: moe.make_bench_plan(core, threads) for threads in self._possible_threads()}
        self._meters = {threads: LimitMeter(core, plan) for threads, plan in self._plans.items()}
        self._comparison = Comparison()
        self._points: list[moe.Record] = []
        self._steps: list[step.StepRecord] = []
        self._ring: dict[str, float] = {}

    def _possible_threads(self) -> list[int]:
        most = moe.make_bench_plan(self._core, 0).threads
        return [threads for threads in self._options.threads if threads <= most] or [most]

    def run(self) -> dict[str, Any]:
        """Measures, and makes the document; of a run that is interrupted too."""
        begin, complete = time.time(), True
        try:
            self._measure()
        except KeyboardInterrupt:
            complete = False
            self._say("interrupted: the record holds what was measured so far")
        document = {
            "version": FORMAT_VERSION,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
            "seconds": round(time.time() - begin),
            "quick": self._options.quick,
            "complete": complete,
            "machine": describe_machine(self._core, next(iter(self._plans.values()))),
            "limits": [meter.record() for meter in self._meters.values()],
            "points": self._points,
            "peers": self._comparison.records,
            "peers_absent": self._comparison.absent,
            "ring": self._ring,
            "steps": self._steps,
            **quietness([*self._points, *self._comparison.records, *self._steps]),
        }
        verdicts, unknown = judge(read_targets(), document)
        document["verdicts"] = [verdict.as_dict() for verdict in verdicts]
        document["not_measured"] = unknown
        document["line"] = last_line(verdicts, unknown) + ("" if complete else "; interrupted")
        document["falls_short"] = not complete or any(not verdict.met for verdict in verdicts)
        return document

    def _measure(self) -> None:
        for threads, meter in self._meters.items():
            record = limits.measured(meter, self._options.seconds)
            figures = ", ".join(f"{name} {cast(Any, record)[name]}" for name in limits.FIELDS.values())
            self._say(f"limits, {threads} threads: {figures}")
        for shape in self._options.shapes:
            for format in self._options.formats:
                self._ours(shape, format)
            if self._options.peers:
                self._peers(shape)
        self._end_to_end()

    def _ours(self, shape: str, format: str) -> None:
        for threads, plan in self._plans.items():
            tokens = self._options.points(shape, threads)
            options = moe.Options(shape, format, tokens, threads, seconds=self._options.seconds)
            bench = moe.MoeBench(self._core, options, plan, self._meters[threads])
            for count in tokens:
                record = bench.point(count)
                self._points.append(record)
                self._say(line_of(record))

    def _peers(self, shape: str) -> None:
        for width in sorted({WIDTH_OF_FORMAT.get(format, 8) for format in self._options.formats}):
            for threads in self._plans:
                before = len(self._comparison.records)
                tokens = self._options.peer_points(shape, threads)
                self._comparison.run(width, shape, threads, tokens, self._options.seconds)
                for record in self._comparison.records[before:]:
                    self._say(line_of(record))

    def _end_to_end(self) -> None:
        threads, plan = max(self._plans.items())
        for format in self._options.formats:
            if format in ("q8_0", "q4_0"):
                record = step.measure(self._core, plan, format, self._options.seconds, self._options.shapes[0])
                self._steps.append(record)
                self._say(f"step of {record['layers']} layers, {format}, {threads} threads: {record['ms']:.3f} ms")
        self._ring = ring.run(max(0.4, self._options.seconds), 4096, -1, -1)
        self._say("ring: " + ", ".join(f"{name} {value:.2f}" for name, value in self._ring.items()))


def line_of(record: Mapping[str, Any]) -> str:
    who = record.get("kernel") or f"{record['peer']} {record['format']}"
    share = record.get("limit_share")
    held = "" if share is None else f", {share:.0%} of {record['limit']}, {record['sustained_share']:.0%} sustained"
    raised = f", raised the {record['raised']} limit" if record.get("raised") else ""
    busy = "" if record["quiet"] else f", not quiet: others {record['others']:.1f} CPUs"
    return (
        f"{record['shape']}, {who}, {record['threads']} threads, {record['tokens']} tokens: {record['ms']:.3f} ms, "
        f"{record['weight_gb_s']:.1f} GB/s, {record['gflop_s']:.0f} GFLOP/s{held}{raised}{busy}"
    )


def quietness(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How much of the run other processes left alone."""
    quiet = sum(bool(record["quiet"]) for record in records)
    return {"quiet": quiet == len(records), "quiet_part": round(quiet / max(1, len(records)), 3)}


def run(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """The document of one run. Raises SyshaxError."""
    core = moe.core_with(options.operators)
    with core_errors(core):
        return Suite(core, options, say).run()
