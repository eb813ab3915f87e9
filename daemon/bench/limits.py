"""`syshaxd bench limits`: what this machine can do at most, and each benchmark's share of it.

The loops are the core's (csrc/bench/limits.cc). A limit is the best of several loops and never below what a benchmark
of the same run reached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from syshaxd.bench.timing import OtherLoad
from syshaxd.core import Core
from syshaxd.planner import Plan

FIELDS = {
    "read": "read_gb_s",
    "fp32": "fp32_gflop_s",
    "bf16": "bf16_gflop_s",
    "int8": "int8_gop_s",
    "int4": "int4_gop_s",
}
"""Names of the limits in the core, and of their figures in records. int4 multiplies 4-bit weights by 8-bit activations;
where an ISA is no faster at that it equals int8, and points are held against int8."""
PEAK_OF_FORMAT = {"bf16": "bf16", "fp16": "fp32", "q8_0": "int8", "q4_0": "int8"}
"""The operations that a format computes with. Formats of vendors multiply integers."""
IMPLIED = {"bf16": "fp32", "int4": "int8"}
"""What any CPU can compute by widening, at the other's speed."""
CACHE_MULTIPLE = 8
MIN_READ_BYTES = 32 << 20


class LimitsRecord(TypedDict):
    """What `syshaxd bench limits --json` prints."""

    threads: int
    nodes: int
    cpu: str
    isa: str
    read_gb_s: float
    fp32_gflop_s: float
    bf16_gflop_s: float
    int8_gop_s: float
    int4_gop_s: float
    winners: dict[str, str]
    """For each limit the loop that set it, or the benchmark that exceeded all loops."""
    loops: dict[str, dict[str, float]]
    """For each limit what its loops reached, best first."""
    others: float
    """CPUs that other processes kept busy while it was measured."""


def peak_of(format: str) -> str:
    return PEAK_OF_FORMAT.get(format, "int8")


def last_level_cache_bytes(cpus: frozenset[int], root: Path = Path("/")) -> int:
    """Sum over the distinct last-level caches of these CPUs; 32 MiB where the kernel does not say."""
    caches: dict[tuple[int, str], int] = {}
    for cpu in cpus:
        levels: dict[int, tuple[str, int]] = {}
        for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            size = (index / "size").read_text().strip()
            shared = (index / "shared_cpu_list").read_text().strip()
            levels[int((index / "level").read_text())] = (shared, int(size.removesuffix("K")) * 1024)
        if levels:
            level = max(levels)
            caches[level, levels[level][0]] = levels[level][1]
    return sum(caches.values()) or 32 << 20


@contextmanager
def calling_thread_on(cpus: Sequence[int]) -> Iterator[None]:
    """The calling thread computes as the first node's first thread: it runs where the plan has that thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def share_of_limit(
    milliseconds: float, weight_bytes: float, operations: float, peak: str, limits: Mapping[str, float]
) -> tuple[float, str]:
    """(predicted time / measured time, name of the limit that predicts it); `limits` in G a second, by FIELDS."""
    predicted = {
        "read": weight_bytes / limits[FIELDS["read"]] / 1e6,
        peak: operations / limits[FIELDS[peak]] / 1e6,
    }
    name = max(predicted, key=lambda limit: predicted[limit])
    return predicted[name] / milliseconds, name


class Reached(NamedTuple):
    """What the loops reached in a moment, by FIELDS, in G a second."""

    best: dict[str, float]
    sustained: dict[str, float]
    """The highest of the loops' medians: what a perfect benchmark would have for a median in the same moment."""


class LimitMeter:
    """Measures limits with the threads of a plan, again and again: machines that are shared change by the minute."""

    def __init__(self, core: Core, plan: Plan, isa: str = "") -> None:
        self.plan = plan
        self._isa = isa
        self._core = cast(Any, core)
        bytes_to_read = max(MIN_READ_BYTES, CACHE_MULTIPLE * last_level_cache_bytes(plan.cpus))
        nodes = [node.as_core_plan() for node in plan.nodes]
        self._bench = self._core.LimitBench(nodes, isa, plan.spin_us, bytes_to_read)
        self._loops: dict[str, dict[str, float]] = {limit: {} for limit in FIELDS}
        self._raised: dict[str, tuple[float, str]] = {}

    def measure(self, limits: Sequence[str], seconds: float) -> Reached:
        """Measures each of these for about `seconds`."""
        now = Reached({}, {})
        with calling_thread_on(self.plan.nodes[0].cpus):
            for limit in limits:
                for name, best, sustained in self._bench.measure(limit, seconds):
                    self._note(limit, name, best / 1e9)
                    for kept, value in zip(now, (best, sustained), strict=True):
                        kept[FIELDS[limit]] = max(kept.get(FIELDS[limit], 0.0), value / 1e9)
        return now

    def _note(self, limit: str, name: str, value: float) -> None:
        """A loop that may set several limits counts for all of them."""
        best = max([value, *(loops[name] for loops in self._loops.values() if name in loops)])
        self._loops[limit][name] = best
        for loops in self._loops.values():
            if name in loops:
                loops[name] = best

    def raise_to(self, limit: str, value: float, by: str) -> bool:
        """A benchmark reached `value` GB/s or G(FL)OP/s. True when that exceeds all that was measured before."""
        if value <= self.best(limit)[0]:
            return False
        self._raised[limit] = (value, by)
        return True

    def best(self, limit: str) -> tuple[float, str]:
        """(value, what set it); (0, "") when it was not measured."""
        figures = [(value, name) for name, value in self._loops[limit].items()]
        if limit in self._raised:
            figures.append(self._raised[limit])
        if limit in IMPLIED:
            figures.append(self.best(IMPLIED[limit]))
        return max(figures, default=(0.0, ""))

    def record(self, others: float = 0.0) -> LimitsRecord:
        best = {limit: self.best(limit) for limit in FIELDS}
        figures = {FIELDS[limit]: round(value, 2) for limit, (value, _) in best.items()}
        loops = {
            limit: {name: round(value, 2) for name, value in sorted(found.items(), key=lambda item: -item[1])}
            for limit, found in self._loops.items()
        }
        return cast(
            LimitsRecord,
            {
                "threads": self.plan.threads,
                "nodes": len(self.plan.nodes),
                "cpu": self._core.cpu_name(),
                "isa": self._core.isa_effective(self._isa),
                **figures,
                "winners": {limit: name for limit, (_, name) in best.items()},
                "loops": loops,
                "others": round(others, 2),
            },
        )


def measured(meter: LimitMeter, seconds: float) -> LimitsRecord:
    """All limits, each for about `seconds`. Raises CoreError."""
    load = OtherLoad()
    meter.measure(list(FIELDS), seconds)
    return meter.record(load.cpus())
