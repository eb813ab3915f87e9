"""A client process of `syshaxd bench sessions`: sends requests of one size through the layers, as told line by line.

Each line of standard input is {"seconds": S, "requests": N} (N requests, or S seconds of them, or with both 0 until the
line "stop"); each is answered by one JSON object with what was done. Knows the ring, nothing of the daemon.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from typing import Any

import numpy as np

from syshax.errors import InternalError
from syshax.ring import Ring
from syshaxd.bench.moe import parse_shape
from syshaxd.bench.routing import Routing

BFLOAT16 = 2
PATIENCE_SECONDS = 300.0


class Sender:
    """tokens: of each request."""

    def __init__(self, ring: Ring, shape: str, tokens: int, layers: int, seed: int) -> None:
        hidden, _, experts, self._top_k = parse_shape(shape)
        self._ring, self._tokens = ring, tokens
        self._routing = Routing(layers, experts, self._top_k, seed)
        states = np.random.default_rng(seed).standard_normal((tokens, hidden), np.float32).view(np.uint32) >> 16
        self._inputs, self._output = states.astype(np.uint16), np.empty((tokens, hidden), np.uint16)
        self._weights = np.full((tokens, self._top_k), 1 / self._top_k, np.float32)
        self._prepared = [self._routing.next(tokens) for _ in range(16 * layers)]
        self._sent = 0

    def send(self) -> float:
        """Seconds that the request took. Raises InternalError for an answer that is none."""
        layer, ids = self._prepared[self._sent % len(self._prepared)]
        self._sent += 1
        begin = time.perf_counter()
        result = self._ring.moe(
            layer, self._tokens, self._top_k, BFLOAT16,
            self._inputs.ctypes.data, ids.ctypes.data, self._weights.ctypes.data, self._output.ctypes.data,
            PATIENCE_SECONDS,
        )  # fmt: skip
        if result.status != 0:
            raise InternalError(f"layer {layer} ended with status {result.status}")
        return time.perf_counter() - begin


def told_to_stop() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0]) and sys.stdin.readline().strip() == "stop"


def serve(sender: Sender, seconds: float, requests: int) -> dict[str, Any]:
    taken: list[float] = []
    begin = time.perf_counter()
    for _ in range(requests or sys.maxsize):
        taken.append(sender.send())
        if seconds and time.perf_counter() - begin >= seconds:
            break
        if not seconds and not requests and told_to_stop():
            break
    ms = np.array(taken) * 1e3
    return {
        "seconds": time.perf_counter() - begin,
        "requests": len(taken),
        "p50_ms": round(float(np.percentile(ms, 50)), 3),
        "p99_ms": round(float(np.percentile(ms, 99)), 3),
    }


def main() -> None:
    memory, doorbell, connection = map(int, sys.argv[1:4])
    shape, tokens, layers, seed, cpu = sys.argv[4], *map(int, sys.argv[5:9])
    os.sched_setaffinity(0, {cpu})
    ring = Ring(memory, doorbell, socket.socket(fileno=connection))
    sender = Sender(ring, shape, tokens, layers, seed)
    for line in sys.stdin:
        if line.strip() == "stop":
            continue
        wanted = json.loads(line)
        print(json.dumps(serve(sender, wanted["seconds"], wanted["requests"])), flush=True)
    ring.close()


if __name__ == "__main__":
    main()
