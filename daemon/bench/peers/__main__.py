"""One peer, one format, in this process: `python -m syshaxd.bench.peers NAME FORMAT SHAPE THREADS TOKENS SECONDS`.

Prints one JSON object a line: records as of `measure`, or {"absent": reason}. Started by `syshaxd.bench.comparison`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from syshaxd.bench.moe import parse_shape, parse_tokens
from syshaxd.bench.peers import PEERS, PeerAbsentError
from syshaxd.bench.routing import Routing
from syshaxd.bench.timing import time_calls


def measure(
    name: str, format: str, shape_name: str, threads: int, tokens: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """A record for each number of tokens, with the fields of `bench moe` that apply."""
    peer, shape = PEERS[name], parse_shape(shape_name)
    hidden, intermediate, experts, top_k = shape
    layer = importlib.import_module(f"{__package__}.{peer.module}").load(format, shape, threads)
    expert_bytes = 3 * hidden * intermediate * peer.formats[format].bytes_per_weight
    for count in tokens:
        rng = np.random.default_rng(0)
        layer.prepare(rng.standard_normal((count, hidden), np.float32) * np.float32(0.5))
        routing = Routing(1, experts, top_k)
        run = calls_of(layer, routing, count, expert_bytes)
        timing = time_calls(run, seconds)
        operations = 2 * 3 * hidden * intermediate * count * top_k
        yield {
            "peer": name,
            "format": format,
            "width": peer.formats[format].width,
            "shape": shape_name,
            "threads": threads,
            "tokens": count,
            "ms": round(timing.seconds * 1e3, 4),
            "ms_min": round(timing.shortest * 1e3, 4),
            "weight_gb_s": round(timing.touched_per_second / 1e9, 2),
            "gflop_s": round(operations / timing.seconds / 1e9, 2),
            "calls": timing.calls,
            "quiet": timing.quiet,
            "others": round(timing.others, 2),
        }


def calls_of(layer: Any, routing: Routing, tokens: int, expert_bytes: float) -> Any:
    def call() -> tuple[float, float]:
        _, ids = routing.next(tokens)
        begin = time.perf_counter()
        layer.run(ids)
        return time.perf_counter() - begin, len(np.unique(ids)) * expert_bytes

    return call


def main(arguments: Sequence[str]) -> None:
    name, format, shape, threads, tokens, seconds = arguments
    try:
        for record in measure(name, format, shape, int(threads), parse_tokens(tokens), float(seconds)):
            print(json.dumps(record), flush=True)
    except (PeerAbsentError, ImportError, OSError, AttributeError, RuntimeError) as error:
        print(json.dumps({"absent": str(error) or type(error).__name__}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some peers' thread pools do not end


if __name__ == "__main__":
    main(sys.argv[1:])
