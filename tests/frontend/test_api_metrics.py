"""Metrics over processes: what any of them shows is what one process alone would have counted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from syshaxd.frontend.board import Board
from syshaxd.frontend.instruments import Instruments

BOUNDS = (2**-7, 0.125, 1.0)
"""Powers of two, as the values: their sums are exact in any order."""
values = st.sampled_from([0.0, 2**-10, 2**-7, 0.0625, 0.125, 0.5, 1.0, 1.5, 2.0**30])
steps = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["m", 'a "quoted"\\ \n one', "ü"]), values), max_size=30)


class Process:
    """One process's instruments."""

    def __init__(self, board: Board) -> None:
        self.registry = CollectorRegistry()
        made = Instruments(board)
        self.registry.register(made)
        self.counter = made.counter("c", "text", ("l",))
        self.gauge = made.gauge("g", "text", ("l",))
        self.histogram = made.histogram("h", "text", ("l",), BOUNDS)
        self.opinion = made.opinion("o", "text", ("l",))


def lines(registry: CollectorRegistry) -> set[str]:
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@settings(max_examples=60, deadline=None)
@given(steps, st.sets(st.integers(1, 3)))
def test_the_text_is_that_of_prometheus_client_for_all_that_was_counted(
    steps: list[tuple[int, str, float]], dead: set[int]
) -> None:
    first = Board.share(4)
    processes = [Process(first), *(Process(Board(4, row, first.descriptor)) for row in (1, 2, 3))]
    expected = CollectorRegistry()
    counter = Counter("c", "text", ("l",), registry=expected)
    gauge = Gauge("g", "text", ("l",), registry=expected)
    histogram = Histogram("h", "text", ("l",), registry=expected, buckets=BOUNDS)
    Gauge("o", "text", ("l",), registry=expected)
    for row, label, value in steps:
        processes[row].counter.labels(label).inc(int(value))
        counter.labels(label).inc(int(value))
        processes[row].gauge.labels(label).inc()
        gauge.labels(label).inc(row not in dead)
        processes[row].histogram.labels(label).observe(value)
        histogram.labels(label).observe(value)
    for row in dead:
        first.retire(row)
    for process in processes:
        assert lines(process.registry) == lines(expected)


def test_the_least_opinion_counts() -> None:
    first = Board.share(3)
    processes = [Process(first), *(Process(Board(3, row, first.descriptor)) for row in (1, 2))]

    def shown() -> list[float | None]:
        return [process.registry.get_sample_value("o", {"l": "w"}) for process in processes]

    one, two = (process.opinion.labels("w") for process in processes[1:])
    assert shown() == [None] * 3
    one.set(1)
    assert shown() == [1.0] * 3
    two.set(0)
    assert shown() == [0.0] * 3
    first.retire(2)
    assert shown() == [1.0] * 3
    one.forget()
    assert shown() == [None] * 3
