"""Timing calls on a machine that others may use too.

Calls are timed one by one and gathered into samples of about a tenth of a second. For each sample the kernel's counters
say how much other processes (or other guests of the host) ran meanwhile; medians are taken over quiet samples where
there are enough.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.1
QUIET_CPUS = 0.15
"""A sample is quiet when others took less than this part of one CPU."""
LONG_SECONDS = 1.0
"""A call so long is a measurement even when it is the first."""
ENOUGH_QUIET = 3
PATIENCE = 3
"""How many times `seconds` may pass in waiting for quiet samples."""
TICKS_PER_SECOND = 100


def machine_seconds(stat: str) -> float:
    """CPU time that all processes used and that the host took away (steal), from the text of /proc/stat."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_SECOND


class OtherLoad:
    """CPUs that processes other than this one kept busy since this was made."""

    def __init__(self) -> None:
        self._machine, self._own, self._begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        stat = Path("/proc/stat").read_text(encoding="ascii")
        return machine_seconds(stat), time.process_time(), time.perf_counter()

    def cpus(self) -> float:
        machine, own, now = self._read()
        return max(0.0, (machine - self._machine) - (own - self._own)) / max(now - self._begin, 1e-9)


@dataclass(frozen=True)
class Sample:
    """Calls in a row: their seconds, the bytes that each touched, and the CPUs that others used meanwhile."""

    seconds: tuple[float, ...]
    touched: tuple[float, ...]
    others: float


@dataclass(frozen=True)
class Timing:
    """Medians over the samples used; `others`: the mean over all samples."""

    seconds: float
    shortest: float
    touched: float
    touched_per_second: float
    calls: int
    quiet: bool
    others: float


def calls_wanted(first: float) -> int:
    """How many calls a median needs at least, by the seconds that the first one took."""
    return 5 if first < 0.1 else 3 if first < 0.5 else 2 if first < 3 else 1


def chosen(samples: Sequence[Sample]) -> list[Sample]:
    """The quiet samples, or the third of all with the least load from others."""
    quiet = [sample for sample in samples if sample.others <= QUIET_CPUS]
    if len(quiet) >= min(ENOUGH_QUIET, len(samples)):
        return quiet
    return sorted(samples, key=lambda sample: sample.others)[: max(1, len(samples) // 3)]


def summary(samples: Sequence[Sample]) -> Timing:
    used = chosen(samples)
    pairs = [pair for sample in used for pair in zip(sample.seconds, sample.touched, strict=True)]
    return Timing(
        seconds=statistics.median(seconds for seconds, _ in pairs),
        shortest=min(min(sample.seconds) for sample in samples),
        touched=statistics.median(touched for _, touched in pairs),
        touched_per_second=statistics.median(touched / seconds for seconds, touched in pairs),
        calls=sum(len(sample.seconds) for sample in samples),
        quiet=all(sample.others <= QUIET_CPUS for sample in used),
        others=statistics.fmean(sample.others for sample in samples),
    )


Call = Callable[[], tuple[float, float]]
"""Does the work once; (seconds that it took, bytes of weights that it touched)."""


def one_sample(call: Call) -> Sample:
    load = OtherLoad()
    done: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while not done or time.perf_counter() - begin < SAMPLE_SECONDS:
        done.append(call())
    return Sample(tuple(seconds for seconds, _ in done), tuple(touched for _, touched in done), load.cpus())


def time_calls(call: Call, seconds: float) -> Timing:
    """Calls for about `seconds`, after one or two that do not count unless they are long; longer while not quiet."""
    load, begin = OtherLoad(), time.perf_counter()
    first, touched = call()
    samples: list[Sample] = []
    if first >= LONG_SECONDS:
        samples.append(Sample((first,), (touched,), load.cpus()))
    else:
        if first < SAMPLE_SECONDS:
            call()
        begin = time.perf_counter()
    while not enough(samples, time.perf_counter() - begin, seconds, calls_wanted(first)):
        samples.append(one_sample(call))
    return summary(samples)


def enough(samples: Sequence[Sample], spent: float, seconds: float, calls: int) -> bool:
    """Whether a median may be taken after `spent` of the `seconds` wanted."""
    if not samples or spent < seconds or sum(len(sample.seconds) for sample in samples) < calls:
        return False
    quiet = sum(sample.others <= QUIET_CPUS for sample in samples)
    return quiet >= min(ENOUGH_QUIET, len(samples)) or spent > PATIENCE * seconds
