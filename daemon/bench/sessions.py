"""`syshaxd bench sessions`: several clients at once on the product's data plane, and what they lose or gain by it.

Two questions, each answered within one run. Fairness: a session of one-token requests, alone and beside one that sends
long requests back to back: how its latency grows, and what of the total throughput is lost. Sharing: two replicas that
decode the same layers, one after the other and together: how many times the tokens. The daemon's side is the product's
own Runtime in this process, on one CPU; all clients are processes (bench/sessions_client.py) on another, the same when
alone. Random weights need no checkpoint.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypedDict, cast

from syshax.errors import InternalError, InvalidArgumentError
from syshaxd.bench.moe import make_bench_plan, parse_shape
from syshaxd.core import Core

LAYERS = 3
SLOTS = 2
LONG_TOKENS = 4096
REPLICA_TOKENS = 32
SLICE_MS = 2.0
PATIENCE_SECONDS = 600.0
MOST_P99_RATIO = 2.0
LEAST_THROUGHPUT = 0.95
LEAST_GAIN, LEAST_OF_POSSIBLE = 1.5, 0.9


class Fairness(TypedDict):
    """Milliseconds of one-token requests; throughput: of both together, as parts of what each does alone, summed."""

    format: str
    long_tokens: int
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    throughput: float
    falls_short: list[str]


class Sharing(TypedDict):
    """Tokens a second of two replicas one after the other and together; possible: twice the time of one replica's
    tokens over the time of all tokens in one request, so the gain when all weights are read once."""

    format: str
    tokens: int
    after_each_other: float
    together: float
    gain: float
    possible: float
    batched: float
    falls_short: list[str]


class Client:
    """A process with a session; it begins when told and answers with one JSON object."""

    def __init__(self, bench: SessionsBench, tokens: int) -> None:
        self._bench = bench
        layout = bench.runtime.session_layout(bench.model, tokens, bench.top_k, 2, SLOTS)
        self.session_id = bench.next_session()
        memory = os.memfd_create("syshax-bench-sessions", os.MFD_CLOEXEC)
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ours, theirs = socket.socketpair()
        try:
            os.posix_fallocate(memory, 0, layout["total_bytes"])
            bench.runtime.add_session(
                self.session_id, bench.model, memory, doorbell, bytes(16), tokens, bench.top_k, 2, SLOTS, bench.spin_us
            )
            descriptors = (memory, doorbell, theirs.fileno())
            command = [sys.executable, "-m", "syshaxd.bench.sessions_client", *map(str, descriptors)]
            self._process = subprocess.Popen(
                [*command, bench.shape, str(tokens), str(LAYERS), str(self.session_id), str(bench.client_cpu)],
                pass_fds=descriptors, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        finally:
            os.close(memory)
            os.close(doorbell)
            theirs.close()

    def begin(self, seconds: float = 0.0, requests: int = 0) -> None:
        """For so long, or so many requests, or until it is told to stop."""
        assert self._process.stdin is not None
        print(json.dumps({"seconds": seconds, "requests": requests}), file=self._process.stdin, flush=True)

    def stop(self) -> None:
        assert self._process.stdin is not None
        print("stop", file=self._process.stdin, flush=True)

    def result(self) -> dict[str, Any]:
        """seconds, requests, p50_ms, p99_ms of what it did. Raises InternalError when it failed or never answers."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise InternalError("a client of the sessions benchmark gave no answer")
        return cast(dict[str, Any], json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._ours.close()
        self._bench.runtime.remove_session(self.session_id)


class SessionsBench(AbstractContextManager["SessionsBench"]):
    """A runtime with one thread on the last CPU, a model of random weights, and clients on the first."""

    def __init__(self, core: Core, format: str, shape: str) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            raise InvalidArgumentError("the sessions benchmark needs two CPUs: one for the data plane, one for clients")
        self.shape, self.format = shape, format
        hidden, intermediate, experts, self.top_k = parse_shape(shape)
        self.client_cpu, daemon_cpu = cpus[0], cpus[-1]
        plan = make_bench_plan(core, 1)
        self.spin_us = plan.spin_us
        node = {**plan.nodes[0].as_core_plan(), "cpus": [daemon_cpu], "threads": 1, "share": 1.0}
        self.runtime = core.Runtime([node], "", plan.spin_us, "auto", 1024)
        geometry = {
            "num_layers": LAYERS, "num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate,
            "top_k": self.top_k,
        }  # fmt: skip
        self.model = cast(Any, self.runtime.create_model("sessions", cast(Any, geometry), format))
        self.model.fill_random(0)
        self.model.seal()
        self.runtime.start()
        self._sessions = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.stop()
        self.runtime.drop_model(self.model)

    def next_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def clients(self, *tokens: int) -> list[Client]:
        return [Client(self, count) for count in tokens]

    def fairness(self, seconds: float, long_tokens: int = LONG_TOKENS, long_requests: int = 3) -> Fairness:
        brief, long = self.clients(1, long_tokens)
        try:
            brief.begin(seconds=seconds)
            alone = brief.result()
            long.begin(requests=long_requests)
            long_alone = long.result()
            long.begin(requests=long_requests)
            brief.begin()
            long_beside = long.result()
            brief.stop()
            beside = brief.result()
        finally:
            brief.close()
            long.close()
        throughput = _rate(beside) / _rate(alone) + _rate(long_beside) / _rate(long_alone)
        record = Fairness(
            format=self.format, long_tokens=long_tokens,
            alone_p50_ms=alone["p50_ms"], alone_p99_ms=alone["p99_ms"],
            beside_p50_ms=beside["p50_ms"], beside_p99_ms=beside["p99_ms"],
            throughput=round(throughput, 3), falls_short=[],
        )  # fmt: skip
        most = MOST_P99_RATIO * record["alone_p99_ms"] + SLICE_MS
        if record["beside_p99_ms"] > most:
            record["falls_short"].append(
                f"{self.format}: p99 of one token beside {long_tokens} is {record['beside_p99_ms']:.1f} ms, "
                f"aim {most:.1f} ms"
            )
        if throughput < LEAST_THROUGHPUT:
            record["falls_short"].append(f"{self.format}: total throughput {throughput:.2f}, aim {LEAST_THROUGHPUT}")
        return record

    def sharing(self, seconds: float, tokens: int = REPLICA_TOKENS) -> Sharing:
        one, two, whole = self.clients(tokens, tokens, 2 * tokens)
        try:
            rates = []
            for client in (one, two, whole):
                client.begin(seconds=seconds)
                rates.append(_rate(client.result()))
            one.begin(seconds=seconds)
            time.sleep(0.1)  # replicas are never in step by themselves
            two.begin(seconds=seconds)
            together = [client.result() for client in (one, two)]
            stats = {row["session_id"]: row for row in self.runtime.session_stats()}
        finally:
            for client in (one, two, whole):
                client.close()
        after, joint = tokens * (rates[0] + rates[1]) / 2, tokens * sum(map(_rate, together))
        requests = sum(result["requests"] for result in together)
        record = Sharing(
            format=self.format, tokens=tokens, after_each_other=round(after, 1), together=round(joint, 1),
            gain=round(joint / after, 3), possible=round(2 * tokens * rates[2] / after, 3),
            batched=round(sum(stats[client.session_id]["batched"] for client in (one, two)) / requests, 3),
            falls_short=[],
        )  # fmt: skip
        if record["gain"] < LEAST_GAIN and record["gain"] < LEAST_OF_POSSIBLE * record["possible"]:
            record["falls_short"].append(
                f"{self.format}: two replicas of {tokens} tokens reach {record['gain']:.2f} x one after the other, aim "
                f"{LEAST_GAIN} or {LEAST_OF_POSSIBLE:.0%} of the possible {record['possible']:.2f}"
            )
        return record


def _rate(result: dict[str, Any]) -> float:
    return float(result["requests"]) / max(float(result["seconds"]), 1e-9)


def run(core: Core, formats: Sequence[str], shape: str, seconds: float) -> list[tuple[Fairness, Sharing]]:
    """Both measurements for each format. Raises SyshaxError and CoreError."""
    records = []
    for format in formats:
        with SessionsBench(core, format, shape) as bench:
            records.append((bench.fairness(seconds), bench.sharing(seconds)))
    return records
