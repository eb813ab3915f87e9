"""What the console shows, from the numbers that /metrics shows: rates and percentiles over the last seconds.

Owns the differences between now and then. The metrics are sums over all processes, so any process shows the whole
front-end. Percentiles come from histograms' buckets, as Prometheus makes them: between a bucket's bounds they are
interpolated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from syshaxd.frontend.console_daemon import DaemonWatch
from syshaxd.frontend.metrics import LONG, SHORT, Metrics
from syshaxd.frontend.workers import Worker, Workers

RATE_SECONDS = 4.0
SPARK_SECONDS = 15.0
"""Over which a point of a percentile's line is taken, and rates of what comes by whole requests."""
FIGURE_SECONDS = 60.0
"""Over which a percentile in figures is taken."""
PAST_POINTS = 300
_GAP_SECONDS = 5.0
"""A sampler that paused so long starts its differences anew."""


@dataclass
class Totals:
    """Sums since the start, of one model or of all."""

    generated: float = 0
    prompt: float = 0
    requests: float = 0
    failed: float = 0
    running: float = 0
    waiting: float = 0
    first: list[float] = field(default_factory=lambda: [0.0] * (len(LONG) + 2))
    gaps: list[float] = field(default_factory=lambda: [0.0] * (len(SHORT) + 2))

    def add(self, other: Totals) -> None:
        self.generated += other.generated
        self.prompt += other.prompt
        self.requests += other.requests
        self.failed += other.failed
        self.running += other.running
        self.waiting += other.waiting
        self.first = [a + b for a, b in zip(self.first, other.first, strict=True)]
        self.gaps = [a + b for a, b in zip(self.gaps, other.gaps, strict=True)]


@dataclass
class Snapshot:
    at: float
    models: dict[str, Totals]
    total: Totals
    workers: dict[str, float]
    """URL -> tokens generated."""


def take(metrics: Metrics) -> Snapshot:
    """The sums now. Requests that named no known model stand under ""."""
    metrics.learn()
    models: dict[str, Totals] = {}
    workers: dict[str, float] = {}

    def of(labels: tuple[str, ...]) -> Totals:
        return models.setdefault(labels[0], Totals())

    for labels, counter in metrics.generation_tokens.known():
        of(labels).generated += counter.value()
        workers[labels[1]] = workers.get(labels[1], 0) + counter.value()
    for labels, counter in metrics.prompt_tokens.known():
        of(labels).prompt += counter.value()
    for labels, counter in metrics.requests.known():
        of(labels).requests += counter.value()
        if labels[-1] >= "500" or labels[-1] == "429":
            of(labels).failed += counter.value()
    for labels, gauge in metrics.running.known():
        of(labels).running += gauge.value()
    for labels, gauge in metrics.waiting.known():
        of(labels).waiting += gauge.value()
    for labels, histogram in metrics.first_token.known():
        totals = of(labels)
        totals.first = [a + b for a, b in zip(totals.first, histogram.totals(), strict=True)]
    for labels, histogram in metrics.between_tokens.known():
        totals = of(labels)
        totals.gaps = [a + b for a, b in zip(totals.gaps, histogram.totals(), strict=True)]
    total = Totals()
    for each in models.values():
        total.add(each)
    return Snapshot(time.monotonic(), models, total, workers)


def quantile(part: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """By linear interpolation in its bucket; `counts` has one more, without bound. None: nothing was observed."""
    whole = sum(counts)
    if whole <= 0:
        return None
    rank = part * whole
    for place, so_far in enumerate(accumulate(counts)):
        if so_far >= rank and counts[place] > 0:
            if place >= len(bounds):
                break
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * (rank - (so_far - counts[place])) / counts[place]
    return bounds[-1]


class History:
    """Snapshots of the last minute, and points of the last minutes."""

    def __init__(self, metrics: Metrics, workers: Workers) -> None:
        self._metrics, self._workers = metrics, workers
        self._daemon = DaemonWatch(workers.view)
        self._snapshots: deque[Snapshot] = deque()
        self._points: deque[dict[str, Any]] = deque(maxlen=PAST_POINTS)
        self._started = time.time()

    def past(self) -> dict[str, Any]:
        """For a watcher that comes."""
        return {"now": time.time(), "points": list(self._points), "experts": self._daemon.experts}

    async def sample(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """One more, and the experts' heat map when there is a new one."""
        now = take(self._metrics)
        if self._snapshots and now.at - self._snapshots[-1].at > _GAP_SECONDS:
            self._snapshots.clear()
        while self._snapshots and now.at - self._snapshots[0].at > FIGURE_SECONDS + 1:
            self._snapshots.popleft()
        self._snapshots.append(now)
        experts = await self._daemon.look()
        workers = self._workers.all
        names = {name for worker in workers for name in worker.models} | set(now.models) - {""}
        at = round(time.time(), 3)
        total = self._figures("", now.total)
        models = {name: self._figures(name, now.models.get(name, Totals())) for name in sorted(names)}
        point = {
            "at": at,
            "total": _point(total),
            "models": {name: _point(figures) for name, figures in models.items()},
        }
        self._points.append(point)
        for name, figures in models.items():
            serving = [worker for worker in workers if name in worker.models]
            figures["workers"] = [sum(worker.ready for worker in serving), len(serving)]
        sample = {
            "point": point,
            "ready": not (reason := self._workers.unready_reason()),
            "reason": reason,
            "total": total,
            "models": [{"name": name, **figures} for name, figures in models.items()],
            "workers": [self._worker(worker, now) for worker in workers],
            "daemon": self._daemon.shown(),
        }
        return sample, experts

    def _worker(self, worker: Worker, now: Snapshot) -> dict[str, Any]:
        before = self._before(RATE_SECONDS)
        made = now.workers.get(worker.url, 0) - before.workers.get(worker.url, 0)
        return {
            "url": worker.url,
            "group": worker.group,
            "ready": worker.ready,
            "draining": worker.draining,
            "reason": worker.reason,
            "models": list(worker.models),
            "running": worker.outstanding.total(),
            "experts": worker.experts.state,
            "generated": _rate(made, now.at - before.at),
        }

    def _before(self, seconds: float) -> Snapshot:
        """The newest snapshot that is at least so old, else the oldest."""
        now = self._snapshots[-1].at
        for snapshot in reversed(self._snapshots):
            if now - snapshot.at >= seconds - 0.1:
                return snapshot
        return self._snapshots[0]

    def _figures(self, name: str, now: Totals) -> dict[str, Any]:
        """`name` "": all models."""

        def then(seconds: float) -> tuple[Totals, float]:
            before = self._before(seconds)
            return (before.models.get(name) or Totals() if name else before.total), self._snapshots[-1].at - before.at

        recent, seconds = then(RATE_SECONDS)
        spark, longer = then(SPARK_SECONDS)
        minute, _ = then(FIGURE_SECONDS)
        return {
            "generated": _rate(now.generated - recent.generated, seconds),
            "prompt": _rate(now.prompt - spark.prompt, longer),
            "requests": _rate(now.requests - spark.requests, longer),
            "failed": now.failed - minute.failed,
            "running": now.running,
            "waiting": now.waiting,
            "first": _percentiles(LONG, now.first, minute.first),
            "gap": _percentiles(SHORT, now.gaps, minute.gaps),
            "first_spark": _percentiles(LONG, now.first, spark.first),
            "gap_spark": _percentiles(SHORT, now.gaps, spark.gaps),
        }


def _rate(difference: float, seconds: float) -> float:
    return round(max(0.0, difference) / seconds, 2) if seconds > 0.5 else 0.0


def _percentiles(bounds: Sequence[float], now: Sequence[float], before: Sequence[float]) -> list[float | None]:
    """The median and the 99th."""
    counts = [late - early for late, early in zip(now[:-1], before[:-1], strict=True)]
    found = (quantile(part, bounds, counts) for part in (0.5, 0.99))
    return [None if value is None else round(value, 5) for value in found]


def _point(figures: dict[str, Any]) -> list[float | None]:
    """What lines are drawn of: tokens/s, TTFT p50 and p99, gap p50 and p99, running, waiting."""
    return [
        figures["generated"],
        *figures.pop("first_spark"),
        *figures.pop("gap_spark"),
        figures["running"],
        figures["waiting"],
    ]
