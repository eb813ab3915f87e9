"""Counters, gauges and histograms for Prometheus, kept on the board: any process shows the sums of all.

Made because an observation happens for every streamed event: it costs two additions to shared memory here, a quarter of
what prometheus_client's do, whose files for several processes cost as much again and forget nobody
(docs/decisions/0016). The exposition format stays prometheus_client's.

A series is named on the board by a JSON list of its metric and labels, so that a process also shows those that only
others have seen.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from syshaxd.frontend.board import Board, Kind

Labels = tuple[str, ...]


class Series(Protocol):
    def shown(self) -> tuple[Any, ...] | None:
        """What prometheus_client's add_metric takes after the labels; None: nothing to show."""


S = TypeVar("S", bound=Series)


class Counter:
    """Only grows; what a dead process counted stays."""

    __slots__ = ("_add", "value")

    def __init__(self, board: Board, name: str) -> None:
        cell = board.counter(name)
        self._add, self.value = cell.add, cell.total

    def inc(self, number: int = 1) -> None:
        self._add(number)

    def shown(self) -> tuple[Any, ...]:
        return (self.value(),)


class Gauge:
    """What is now, summed over the processes; a dead one's part is gone."""

    __slots__ = ("_add", "set", "value")

    def __init__(self, board: Board, name: str) -> None:
        cell = board.cell(name)
        self._add, self.set, self.value = cell.add, cell.set, cell.total

    def inc(self, number: int = 1) -> None:
        self._add(number)

    def dec(self, number: int = 1) -> None:
        self._add(-number)

    def shown(self) -> tuple[Any, ...]:
        return (self.value(),)


class Opinion:
    """A number that every process finds for itself: the least is shown, of those that have found one."""

    __slots__ = ("_cell",)

    def __init__(self, board: Board, name: str) -> None:
        self._cell = board.cell(name)

    def set(self, number: int) -> None:
        """Not negative."""
        self._cell.set(number + 1)

    def forget(self) -> None:
        """This process has none any more."""
        self._cell.set(0)

    def shown(self) -> tuple[Any, ...] | None:
        found = [part - 1 for part in self._cell.parts() if part]
        return (min(found),) if found else None


class Histogram:
    """Observations by upper bound, and their sum. `bounds` ascend and end before infinity."""

    __slots__ = ("_bounds", "_first", "_mine", "_sum", "totals")

    def __init__(self, board: Board, name: str, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        reals = board.reals(name, len(bounds) + 2)
        self._mine, self._first = reals.mine, reals.first
        self._sum = self._first + len(bounds) + 1
        self.totals = reals.totals
        """Observations of each bucket (the last one has no bound), then the sum of all values."""

    def observe(self, value: float) -> None:
        mine = self._mine
        mine[self._first + bisect_left(self._bounds, value)] += 1.0
        mine[self._sum] += value

    def shown(self) -> tuple[Any, ...]:
        *counts, total = self.totals()
        so_far = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            so_far += count
            buckets.append((floatToGoString(bound), so_far))  # type: ignore[no-untyped-call]
        return buckets, total


class Family(Generic[S]):
    """One metric and its series by labels."""

    def __init__(self, name: str, text: str, labels: Labels, make: Callable[[str], S], form: Callable[..., Any]):
        self.name, self.label_names = name, labels
        self._text, self._make, self._form = text, make, form
        self._series: dict[Labels, S] = {}

    def labels(self, *values: str) -> S:
        """The series; the same one every time."""
        if values not in self._series:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self.name} has the labels {self.label_names}, not {values}")
            self._series[values] = self._make(json.dumps([self.name, *values]))
        return self._series[values]

    def known(self) -> list[tuple[Labels, S]]:
        """Labels and series, those of other processes as of the last `Instruments.learn`."""
        return list(self._series.items())

    def metric(self) -> Metric:
        """In the form that prometheus_client writes."""
        shown: Metric = self._form(self.name, self._text, labels=self.label_names)
        for values, series in self.known():
            if (numbers := series.shown()) is not None:
                shown.add_metric(values, *numbers)  # type: ignore[attr-defined]
        return shown


class Instruments(Collector):
    """All families of one board; a registry's collector."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._families: dict[str, Family[Any]] = {}

    def counter(self, name: str, text: str, labels: Labels = ()) -> Family[Counter]:
        """Shown as NAME_total."""
        return self._keep(Family(name, text, labels, lambda key: Counter(self._board, key), CounterMetricFamily))

    def gauge(self, name: str, text: str, labels: Labels = ()) -> Family[Gauge]:
        return self._keep(Family(name, text, labels, lambda key: Gauge(self._board, key), GaugeMetricFamily))

    def opinion(self, name: str, text: str, labels: Labels = ()) -> Family[Opinion]:
        """A gauge that every process finds for itself."""
        return self._keep(Family(name, text, labels, lambda key: Opinion(self._board, key), GaugeMetricFamily))

    def histogram(self, name: str, text: str, labels: Labels, bounds: Sequence[float]) -> Family[Histogram]:
        make = lambda key: Histogram(self._board, key, bounds)  # noqa: E731
        return self._keep(Family(name, text, labels, make, HistogramMetricFamily))

    def learn(self) -> None:
        """Takes in the series that other processes have made."""
        for kind in Kind:
            for name, _ in self._board.names(kind):
                metric, *labels = json.loads(name) if name.startswith("[") else ("",)
                if (family := self._families.get(metric)) is not None:
                    family.labels(*labels)

    def collect(self) -> Iterator[Metric]:
        self.learn()
        found: list[Metric] = []
        for _ in self._board.settled():
            found = [family.metric() for family in self._families.values()]
        yield from found

    def _keep(self, family: Family[S]) -> Family[S]:
        self._families[family.name] = family
        if not family.label_names:
            family.labels()
        return family
