"""`syshaxd bench moe`: how fast this machine computes a MoE layer, without a daemon.

The layer is the product's own: plan, pools, kernels and arenas as the daemon would make them, random weights. What is
timed is `Model.forward`. The weights are at least eight times the last-level caches, so that decoding reads memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from syshax.errors import InvalidArgumentError
from syshaxd.bench.routing import Routing
from syshaxd.config import ComputeConfig
from syshaxd.core import Core, GeometryDict, compiled_core, core_errors
from syshaxd.machine import Machine
from syshaxd.planner import Plan, make_plan

SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "deepseek-v3": (7168, 2048, 16, 8)}
"""hidden_size, intermediate_size, experts, top_k."""
DTYPES = ("float32", "float16", "bfloat16")
CACHE_MULTIPLE = 8
MIN_CALLS, WARMUP_CALLS = 5, 2


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


class MoeBench:
    """A loaded model and what is needed to time it."""

    def __init__(self, core: Core, options: Options) -> None:
        self._options = options
        self._hidden, self._intermediate, self._experts, self._top_k = parse_shape(options.shape)
        if options.dtype not in DTYPES:
            raise InvalidArgumentError(f'dtype "{options.dtype}" is none of {", ".join(DTYPES)}')
        self._plan = make_plan(core.topology(), ComputeConfig(threads=options.threads), Machine.read())
        values, size = cast(tuple[int, int], cast(Any, core).format_blocks(options.format))
        self._expert_bytes = 3 * self._hidden * self._intermediate // values * size
        self._layers = self._enough_layers(last_level_cache_bytes(self._plan.cpus))
        nodes = [node.as_core_plan() for node in self._plan.nodes]
        self._runtime = core.Runtime(nodes, options.isa, self._plan.spin_us, "auto", 1024)
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
        """Times calls for about `seconds`, at least MIN_CALLS of them; medians."""
        rng = np.random.default_rng(self._options.seed)
        routing = Routing(self._layers, self._experts, self._top_k, self._options.seed)
        hidden = in_dtype(rng.standard_normal((tokens, self._hidden), np.float32), self._options.dtype)
        weights = np.full((tokens, self._top_k), 1.0 / self._top_k, np.float32)
        times: list[float] = []
        rates: list[float] = []
        busy_before, begin = 0, 0.0
        for call in range(1 << 20):
            if call == WARMUP_CALLS:
                busy_before, begin = self._busy_ns(), time.perf_counter()
            if call >= WARMUP_CALLS + MIN_CALLS and time.perf_counter() - begin > self._options.seconds:
                break
            layer, ids = routing.next(tokens)
            started = time.perf_counter()
            self._model.forward(layer, hidden, ids, weights, self._options.dtype)
            elapsed = time.perf_counter() - started
            if call >= WARMUP_CALLS:
                times.append(elapsed)
                rates.append(len(np.unique(ids)) * self._expert_bytes / elapsed)
        busy = (self._busy_ns() - busy_before) / 1e9 / (sum(times) * self._plan.threads)
        flop = 2 * 3 * self._hidden * self._intermediate * tokens * self._top_k
        median = statistics.median(times)
        return {
            "tokens": tokens,
            "ms": round(median * 1e3, 4),
            "weight_gb_s": round(statistics.median(rates) / 1e9, 2),
            "gflop_s": round(flop / median / 1e9, 2),
            "kernel": self._model.kernels()[self._options.dtype],
            "shape": self._options.shape,
            "format": self._options.format,
            "dtype": self._options.dtype,
            "threads": self._plan.threads,
            "nodes": len(self._plan.nodes),
            "layers": self._layers,
            "calls": len(times),
            "ms_min": round(min(times) * 1e3, 4),
            "busy": round(busy, 3),
        }

    def _busy_ns(self) -> int:
        return sum(int(nanoseconds) for nanoseconds in self._runtime.stats()["busy_ns"])


def in_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """float32, float16, or the upper half of float32 for bfloat16."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def run(options: Options) -> Iterator[Record]:
    """One record for each number of tokens, as it is measured. Raises SyshaxError."""
    core = compiled_core()
    with core_errors(core):
        bench = MoeBench(core, options)
        with calling_thread_on(bench.plan.nodes[0].cpus):
            for tokens in options.tokens:
                yield bench.point(tokens)
