"""A decode step's experts end to end: a client process, the ring, the dispatcher and all layers, one token.

The daemon's side is the product's own Runtime in this process, as `syshaxd` runs it; the client is a process of its own
(this module as a program) that sends layer after layer as a model would. Random weights need no checkpoint.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any, TypedDict, cast

import numpy as np

from syshax.errors import InternalError
from syshax.ring import Ring
from syshaxd.bench.moe import parse_shape
from syshaxd.bench.routing import Routing
from syshaxd.bench.timing import time_calls
from syshaxd.core import Core
from syshaxd.planner import Plan, client_spin_us

LAYERS = 3
SHAPE = "qwen3-30b-a3b"
BFLOAT16 = 2
SLOTS = 2
PATIENCE_SECONDS = 120.0


class StepRecord(TypedDict):
    """Medians; `ms`: one token through all layers, as the client saw it."""

    format: str
    shape: str
    layers: int
    threads: int
    ms: float
    ms_min: float
    calls: int
    quiet: bool
    others: float


def measure(core: Core, plan: Plan, format: str, seconds: float, shape: str = SHAPE) -> StepRecord:
    """Raises SyshaxError and CoreError."""
    hidden, intermediate, experts, top_k = parse_shape(shape)
    nodes = [node.as_core_plan() for node in plan.nodes]
    runtime = core.Runtime(nodes, "", plan.spin_us, "auto", 1024)
    model = cast(
        Any,
        runtime.create_model(
            "step",
            {
                "num_layers": LAYERS,
                "num_experts": experts,
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "top_k": top_k,
            },
            format,
        ),
    )
    model.fill_random(0)
    model.seal()
    runtime.start()
    layout = runtime.session_layout(model, 1, top_k, 2, SLOTS)
    memory = os.memfd_create("syshax-bench-step", os.MFD_CLOEXEC)
    doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    ours, theirs = socket.socketpair()
    try:
        os.posix_fallocate(memory, 0, layout["total_bytes"])
        spin_us = client_spin_us(plan, frozenset(os.sched_getaffinity(0)))
        runtime.add_session(1, model, memory, doorbell, bytes(16), 1, top_k, 2, SLOTS, spin_us)
        times = run_client((memory, doorbell, theirs.fileno()), shape, seconds)
    finally:
        runtime.stop()
        for descriptor in (memory, doorbell):
            os.close(descriptor)
        ours.close()
        theirs.close()
    return cast(StepRecord, {"format": format, "shape": shape, "layers": LAYERS, "threads": plan.threads, **times})


def run_client(descriptors: tuple[int, int, int], shape: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "syshaxd.bench.step", *map(str, descriptors), shape, str(seconds)]
    done = subprocess.run(
        command, pass_fds=descriptors, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InternalError(f"the client of the step benchmark failed: {last}")
    return cast(dict[str, Any], json.loads(done.stdout))


def client(memory: int, doorbell: int, connection: int, shape: str, seconds: float) -> dict[str, Any]:
    """Steps through the layers; what `measure` reports of it."""
    hidden, _, experts, top_k = parse_shape(shape)
    ring = Ring(memory, doorbell, socket.socket(fileno=connection))
    routing = Routing(LAYERS, experts, top_k)
    states = np.random.default_rng(0).standard_normal((1, hidden), np.float32).view(np.uint32) >> 16
    inputs, output = states.astype(np.uint16), np.empty((1, hidden), np.uint16)
    weights = np.full((1, top_k), 1 / top_k, np.float32)

    def step() -> tuple[float, float]:
        chosen = [routing.next(1) for _ in range(LAYERS)]
        begin = time.perf_counter()
        for layer, ids in chosen:
            result = ring.moe(
                layer,
                1,
                top_k,
                BFLOAT16,
                inputs.ctypes.data,
                ids.ctypes.data,
                weights.ctypes.data,
                output.ctypes.data,
                PATIENCE_SECONDS,
            )
            if result.status != 0:
                raise InternalError(f"layer {layer} ended with status {result.status}")
        return time.perf_counter() - begin, 0.0

    timing = time_calls(step, seconds)
    ring.close()
    return {
        "ms": round(timing.seconds * 1e3, 4),
        "ms_min": round(timing.shortest * 1e3, 4),
        "calls": timing.calls,
        "quiet": timing.quiet,
        "others": round(timing.others, 2),
    }


if __name__ == "__main__":
    memory_fd, doorbell_fd, connection_fd = map(int, sys.argv[1:4])
    print(json.dumps(client(memory_fd, doorbell_fd, connection_fd, sys.argv[4], float(sys.argv[5]))))
