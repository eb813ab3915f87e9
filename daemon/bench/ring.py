"""`syshaxd bench ring`: a client process to the data plane and back, what both cost when idle, and whether spinning
gives way where CPUs are wanted by others; held against targets.toml.

Owns which CPUs the two sides take and the verdict; the measuring is the core's (csrc/bench/ring.cc), `spinning` and
`idling`.
"""

from __future__ import annotations

import os
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from syshax.errors import HardwareError, InvalidArgumentError
from syshaxd import _core
from syshaxd.bench import idling, spinning
from syshaxd.bench.targets import TABLE

PARTS = ("latency", "idle", "spinning")
MEANINGS = {
    "spin_us_p50": "there and back while both sides look",
    "spin_us_p99": "the same, one in a hundred takes longer",
    "floor_spin_us": "a bare word in shared memory and the same bytes",
    "parked_us_p50": "there and back when the daemon sleeps",
    "floor_parked_us": "two bare eventfds",
}


LATENCY_ROUNDS = 7
ROUNDS = 9
SPINNING_SECONDS = 0.15
IDLE_SECONDS = 5.0


def run(seconds: float, payload_bytes: int, client_cpu: int, daemon_cpu: int) -> dict[str, float]:
    """Microseconds by the names of MEANINGS. A CPU of -1 is chosen here: two different ones where there are two.

    Raises HardwareError for a CPU that this process may not use, InvalidArgumentError for sizes and times out of range.
    """
    allowed = sorted(os.sched_getaffinity(0))
    for cpu in (client_cpu, daemon_cpu):
        if cpu != -1 and cpu not in allowed:
            raise HardwareError(f"CPU {cpu} may not be used here", f"allowed are {','.join(map(str, allowed))}")
    client = allowed[0] if client_cpu == -1 else client_cpu
    daemon = allowed[-1] if daemon_cpu == -1 else daemon_cpu
    try:
        return _core.bench_ring(seconds, payload_bytes, client, daemon)
    except _core.CoreError as error:
        raise InvalidArgumentError(str(error), error.hint) from error


def round_trips(seconds: float, payload_bytes: int, client_cpu: int, daemon_cpu: int) -> dict[str, float]:
    """Medians of several rounds, and of the rounds' ratios to their floors: the host's moods change within a second."""
    rounds = [run(seconds / LATENCY_ROUNDS, payload_bytes, client_cpu, daemon_cpu) for _ in range(LATENCY_ROUNDS)]
    figures = {name: statistics.median(each[name] for each in rounds) for name in MEANINGS}
    for kind in ("spin", "parked"):
        ratios = (each[f"{kind}_us_p50"] / each[f"floor_{kind}_us"] for each in rounds)
        figures[f"{kind}_ratio"] = statistics.median(ratios)
    return figures


def whole(
    parts: Sequence[str], seconds: float, payload_bytes: int, cpus: tuple[int, int], say: Callable[[str], None]
) -> dict[str, Any]:
    """The figures of the wanted parts, `verdicts`, `line` and `falls_short`. Raises SyshaxError."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise InvalidArgumentError(f'part "{unknown[0]}" is none of {", ".join(PARTS)}')
    figures: dict[str, Any] = {}
    if "latency" in parts:
        say("round trips, and the least that the machine allows")
        figures |= round_trips(seconds, payload_bytes, *cpus)
    if "idle" in parts:
        say("a daemon and a client with nothing to do")
        figures |= idling.measure(IDLE_SECONDS)
    if "spinning" in parts:
        figures["spinning"] = []
        for name in spinning.SCENARIOS:
            say(f"spinning: {name}")
            figures["spinning"].append(spinning.measure(name, SPINNING_SECONDS, ROUNDS))
        figures["spinning_slowdown"] = max(1 / record["ratio"] for record in figures["spinning"])
    verdicts = judge(read_targets(), figures)
    short = [verdict for verdict in verdicts if not verdict["met"]]
    found = "; ".join(
        f"{verdict['target']}: {verdict['value']:.3g}, at most {verdict['at_most']:g}" for verdict in short
    )
    line = f"bench ring: {f'falls short: {found}' if short else f'nothing falls short in {len(verdicts)} comparisons'}"
    return {**figures, "verdicts": verdicts, "line": line, "falls_short": bool(short)}


def read_targets(file: Path = TABLE) -> list[dict[str, Any]]:
    """Rows of [[ring]]: name, figure, at_most."""
    rows: list[dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))["ring"]
    return rows


def judge(targets: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One verdict for every target whose figure was measured."""
    return [
        {
            "target": target["name"],
            "value": round(figures[target["figure"]], 4),
            "at_most": target["at_most"],
            "met": figures[target["figure"]] <= target["at_most"],
        }
        for target in targets
        if target["figure"] in figures
    ]
