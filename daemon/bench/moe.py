"""`syshaxd bench moe`: how fast this machine computes a MoE layer, without a daemon.

The layer is the product's own: plan, pools, kernels and arenas as the daemon would make them, random weights. What is
timed is `Model.forward`. The weights are at least eight times the last-level caches, so that decoding reads memory.
Before and after each point the machine's limits are measured, so that a point's share of them is of the same minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from syshax.errors import InvalidArgumentError
from syshaxd.bench import limits
from syshaxd.bench.limits import FIELDS, LimitMeter, Reached
from syshaxd.bench.routing import Routing
from syshaxd.bench.timing import time_calls
from syshaxd.config import ComputeConfig
from syshaxd.core import Core, GeometryDict, compiled_core, core_errors
from syshaxd.machine import Machine
from syshaxd.operators.libraries import load_library
from syshaxd.planner import Plan, make_plan

SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "deepseek-v3": (7168, 2048, 16, 8)}
"""hidden_size, intermediate_size, experts, top_k."""
DTYPES = ("float32", "float16", "bfloat16")
CACHE_MULTIPLE = 8
LIMIT_PART, MAX_LIMIT_SECONDS = 0.25, 0.25
"""A limit is measured for this part of a point's time, at most so long."""


class Record(TypedDict):
    """One point. `weight_gb_s`: bytes of the distinct experts touched, scales included, divided by the time."""

    tokens: int
    ms: float
    weight_gb_s: float
    gflop_s: float
    kernel: str
    shape: str
    format: str
    dtype: str
    threads: int
    nodes: int
    layers: int
    calls: int
    ms_min: float
    busy: float
    """Part of the threads' time that was spent computing, not waiting for each other."""
    quiet: bool
    """Whether other processes left the CPUs alone in the calls that the medians are from."""
    others: float
    """CPUs that other processes kept busy meanwhile."""
    weight_bytes: int
    operations: int
    """Of one call; a product and its sum are two."""
    limit: str | None
    """What holds this point at best: "read", or the operations "fp32", "bf16", "int8"; None: no limits measured."""
    limit_share: float | None
    """Time that this limit predicts, divided by the time measured."""
    limits: dict[str, float] | None
    """The limits measured right before and after, by the names of `bench limits`, and never below this point."""
    raised: str | None
    """The limit that this point exceeded and so raised."""
    sustained: dict[str, float] | None
    """What the loops' medians were right before and after: limits are the best of many short runs, points are medians,
    and on a machine with neighbours these differ."""
    sustained_share: float | None
    """As limit_share, with these."""


@dataclass(frozen=True)
class Options:
    shape: str
    format: str = "q8_0"
    tokens: Sequence[int] = (1, 16, 256)
    threads: int = 0
    dtype: str = "bfloat16"
    isa: str = ""
    seconds: float = 1.0
    seed: int = 0
    limits: bool = True
    operators: Sequence[str] = ()
    """Paths of operator libraries, whose formats and kernels then count."""


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """A known name, or HIDDENxINTERMEDIATExEXPERTSxTOPK. Raises InvalidArgumentError."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidArgumentError(
            f'shape "{text}" is neither {" nor ".join(SHAPES)} nor HIDDENxINTERMEDIATExEXPERTSxTOPK',
            "for example 2048x768x128x8",
        )
    hidden, intermediate, experts, top_k = (int(part) for part in parts)
    if top_k > experts:
        raise InvalidArgumentError(f'shape "{text}" chooses {top_k} of {experts} experts')
    return hidden, intermediate, experts, top_k


def parse_tokens(text: str) -> list[int]:
    """Comma-separated numbers of tokens. Raises InvalidArgumentError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidArgumentError(f'tokens "{text}" are not numbers above 0, separated by commas', "for example 1,16")
    return [int(part) for part in parts]


def expert_bytes(core: Core, format: str, hidden: int, intermediate: int) -> int:
    """Bytes of one expert's gate, up and down as stored."""

    def row_bytes(values: int) -> int:
        return int(cast(Any, core).format_row_bytes(format, values))

    return 2 * intermediate * row_bytes(hidden) + hidden * row_bytes(intermediate)


def make_bench_plan(core: Core, threads: int) -> Plan:
    """The plan that the daemon would make; call it before any thread is pinned."""
    return make_plan(core.topology(), ComputeConfig(threads=threads), Machine.read())


class MoeBench:
    """A loaded model and what is needed to time it."""

    def __init__(self, core: Core, options: Options, plan: Plan, meter: LimitMeter | None = None) -> None:
        """`meter`: measures the limits with the same plan; None: shares are not wanted."""
        self._options = options
        self._hidden, self._intermediate, self._experts, self._top_k = parse_shape(options.shape)
        if options.dtype not in DTYPES:
            raise InvalidArgumentError(f'dtype "{options.dtype}" is none of {", ".join(DTYPES)}')
        self._plan, self._meter = plan, meter
        self._now: Reached | None = None
        self._expert_bytes = expert_bytes(core, options.format, self._hidden, self._intermediate)
        self._layers = self._enough_layers(limits.last_level_cache_bytes(plan.cpus))
        nodes = [node.as_core_plan() for node in plan.nodes]
        self._runtime = core.Runtime(nodes, options.isa, plan.spin_us, "auto", 1024)
        self._model = cast(Any, self._runtime.create_model("bench", self._geometry(), options.format))
        self._model.fill_random(options.seed)
        self._model.seal()

    @property
    def plan(self) -> Plan:
        return self._plan

    def _enough_layers(self, cache_bytes: int) -> int:
        return max(1, -(-CACHE_MULTIPLE * cache_bytes // (self._experts * self._expert_bytes)))

    def _geometry(self) -> GeometryDict:
        return {
            "num_layers": self._layers,
            "num_experts": self._experts,
            "hidden_size": self._hidden,
            "intermediate_size": self._intermediate,
            "top_k": self._top_k,
        }

    def point(self, tokens: int) -> Record:
        """Times calls for about `seconds`; medians."""
        before = self._now or self._measure_limits()
        record = self._time(tokens)
        self._now = self._measure_limits()
        if self._meter is not None:
            now = {name: max(value, self._now.best[name]) for name, value in before.best.items()}
            sustained = {name: (value + self._now.sustained[name]) / 2 for name, value in before.sustained.items()}
            hold_against(record, now, sustained, self._meter)
        return record

    def _time(self, tokens: int) -> Record:
        rng = np.random.default_rng(self._options.seed)
        routing = Routing(self._layers, self._experts, self._top_k, self._options.seed)
        hidden = in_dtype(rng.standard_normal((tokens, self._hidden), np.float32), self._options.dtype)
        weights = np.full((tokens, self._top_k), 1.0 / self._top_k, np.float32)
        computing = 0.0

        def call() -> tuple[float, float]:
            nonlocal computing
            layer, ids = routing.next(tokens)
            begin = time.perf_counter()
            self._model.forward(layer, hidden, ids, weights, self._options.dtype)
            elapsed = time.perf_counter() - begin
            computing += elapsed
            return elapsed, len(np.unique(ids)) * self._expert_bytes

        busy_before = self._busy_ns()
        with limits.calling_thread_on(self._plan.nodes[0].cpus):
            timing = time_calls(call, self._options.seconds)
        busy = (self._busy_ns() - busy_before) / 1e9 / (computing * self._plan.threads)
        operations = 2 * 3 * self._hidden * self._intermediate * tokens * self._top_k
        return {
            "tokens": tokens,
            "ms": round(timing.seconds * 1e3, 4),
            "weight_gb_s": round(timing.touched_per_second / 1e9, 2),
            "gflop_s": round(operations / timing.seconds / 1e9, 2),
            "kernel": self._model.kernels()[self._options.dtype],
            "shape": self._options.shape,
            "format": self._options.format,
            "dtype": self._options.dtype,
            "threads": self._plan.threads,
            "nodes": len(self._plan.nodes),
            "layers": self._layers,
            "calls": timing.calls,
            "ms_min": round(timing.shortest * 1e3, 4),
            "busy": round(busy, 3),
            "quiet": timing.quiet,
            "others": round(timing.others, 2),
            "weight_bytes": int(timing.touched),
            "operations": operations,
            "limit": None,
            "limit_share": None,
            "limits": None,
            "raised": None,
            "sustained": None,
            "sustained_share": None,
        }

    def _measure_limits(self) -> Reached:
        if self._meter is None:
            return Reached({}, {})
        seconds = min(LIMIT_PART * self._options.seconds, MAX_LIMIT_SECONDS)
        return self._meter.measure(["read", limits.peak_of(self._options.format)], seconds)

    def _busy_ns(self) -> int:
        return sum(int(nanoseconds) for nanoseconds in self._runtime.stats()["busy_ns"])


def in_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """float32, float16, or the upper half of float32 for bfloat16."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def hold_against(record: Record, now: dict[str, float], sustained: dict[str, float], meter: LimitMeter) -> None:
    """Fills in the record's shares. Bandwidth is that of these minutes; the peak of operations is the best of the run,
    since no neighbour takes it away for long. A point above a limit raises it, in the record and in the meter."""
    peak = limits.peak_of(record["format"])
    now[FIELDS[peak]] = max(now[FIELDS[peak]], meter.best(peak)[0])
    by = f"{record['kernel']}, {record['shape']}, {record['tokens']} tokens"
    for limit, reached in (("read", record["weight_gb_s"]), (peak, record["gflop_s"])):
        meter.raise_to(limit, reached, by)
        if reached > now[FIELDS[limit]]:
            now[FIELDS[limit]] = reached
            record["raised"] = limit
    work = record["ms"], record["weight_bytes"], record["operations"], peak
    share, record["limit"] = limits.share_of_limit(*work, now)
    record["limit_share"] = round(share, 3)
    record["sustained_share"] = round(limits.share_of_limit(*work, sustained)[0], 3)
    record["limits"] = {name: round(value, 2) for name, value in now.items()}
    record["sustained"] = {name: round(value, 2) for name, value in sustained.items()}


def core_with(operators: Sequence[str]) -> Core:
    """The core with these operator libraries loaded. Raises SyshaxError."""
    core = compiled_core()
    for path in operators:
        load_library(core, Path(path))
    return core


def run(options: Options) -> Iterator[Record]:
    """One record for each number of tokens, as it is measured. Raises SyshaxError."""
    core = core_with(options.operators)
    with core_errors(core):
        plan = make_bench_plan(core, options.threads)
        bench = MoeBench(core, options, plan, LimitMeter(core, plan, options.isa) if options.limits else None)
        for tokens in options.tokens:
            yield bench.point(tokens)
