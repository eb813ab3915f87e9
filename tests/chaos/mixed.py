"""Mixed requests from eight sessions at once: every size, dtype, top_k, layer and format; each answer is checked."""

from __future__ import annotations

import time
from typing import Any

import answers
from clients import Kind, bystander
from stand import Process, Stand

SESSIONS = 8
PRIORITIES = ("interactive", "normal", "batch")


def _kind(number: int, count: int, seed: int) -> Kind:
    format = answers.FORMATS[number % len(answers.FORMATS)]
    return Kind(
        format, (1, 400 if number >= 6 else 48), dtypes=answers.DTYPES, priority=PRIORITIES[number % 3], pause=0.0,
        timeout=60.0, threads=1 + number % 2, num_slots=1 + number % 3, count=count, seed=seed + number,
    )  # fmt: skip


def mixed_requests(stand: Stand, requests: int, seed: int) -> dict[str, Any]:
    """Sends them, adds shortfalls to the stand's, gives the figures."""
    even = requests // SESSIONS // 2 * 2  # those with two threads halve it
    counts = [requests - (SESSIONS - 1) * even, *[even] * (SESSIONS - 1)]
    processes = [Process(stand, bystander, _kind(number, count, seed)) for number, count in enumerate(counts)]
    right, begun = 0, 0.0
    try:
        for process in processes:
            process.wait_ready()
        begun = time.monotonic()
        for process in processes:
            process.pipe.send("go")
        for number, process in enumerate(processes):
            report = process.receive(60 + requests / 50)
            if report is None:
                stand.shortfalls.append(f"mixed: session {number} did not come to its end")
                continue
            right += report.right
            stand.outcomes["right"] += report.right
            stand.shortfalls += report.faults
            if report.right != process.kind.count:
                stand.shortfalls.append(f"mixed: session {number}: {report.right} right, {dict(report.errors)}")
    finally:
        for process in processes:
            process.kill()
    seconds = time.monotonic() - begun
    if right != requests:
        stand.shortfalls.append(f"mixed: {right} right answers to {requests} requests")
    return {"requests": requests, "right": right, "seconds": seconds, "per_second": right / seconds}
