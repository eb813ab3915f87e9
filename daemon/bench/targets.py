"""Holds a run of `syshaxd bench all` against targets.toml: what is met, what falls short, what was not measured."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syshaxd.bench.limits import FIELDS, peak_of, share_of_limit
from syshaxd.bench.peers import WIDTH_OF_FORMAT

Document = Mapping[str, Any]
Value = tuple[float, str]
"""(value, what it was compared with)."""


@dataclass(frozen=True)
class Target:
    """A row of targets.toml. An empty list stands for everything."""

    name: str
    measure: str
    at_least: float
    formats: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()

    def covers(self, record: Mapping[str, Any]) -> bool:
        chosen = (("format", self.formats), ("shape", self.shapes), ("threads", self.threads), ("tokens", self.tokens))
        return all(not allowed or record.get(key) in allowed for key, allowed in chosen)


@dataclass(frozen=True)
class Verdict:
    """One target at one point."""

    target: str
    point: str
    value: float
    at_least: float
    against: str

    @property
    def met(self) -> bool:
        return self.value >= self.at_least

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "value": round(self.value, 3), "met": self.met}


TABLE = Path(__file__).with_name("targets.toml")


def read_targets(file: Path = TABLE) -> list[Target]:
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["target"]
    return [target_of(row) for row in rows]


def target_of(row: dict[str, Any]) -> Target:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Target(**fields)


def read_share(target: Target, point: Document, run: Document) -> Value | None:
    limit = point["limits"][FIELDS["read"]]
    return point["weight_gb_s"] / limit, f"{limit:.1f} GB/s"


def peak_share(target: Target, point: Document, run: Document) -> Value | None:
    peak = peak_of(point["format"])
    limit = point["limits"][FIELDS[peak]]
    return point["gflop_s"] / limit, f"{limit:.0f} G/s {peak}"


def against_peers(target: Target, point: Document, run: Document) -> Value | None:
    """Time of the fastest peer of the same width, divided by ours."""
    width = WIDTH_OF_FORMAT.get(point["format"])
    rivals = [
        peer
        for peer in run["peers"]
        if peer["width"] == width
        and (not target.peers or peer["peer"] in target.peers)
        and all(peer[key] == point[key] for key in ("shape", "threads", "tokens"))
    ]
    if not rivals:
        return None
    fastest = min(rivals, key=lambda peer: float(peer["ms"]))
    return fastest["ms"] / point["ms"], f"{fastest['peer']} {fastest['format']} {fastest['ms']:.2f} ms"


def no_dip(target: Target, point: Document, run: Document) -> Value | None:
    """Share of the bound by bytes at the bandwidth, or operations at the best rate that the format reached."""
    same = [other for other in run["points"] if all(other[key] == point[key] for key in ("shape", "format", "threads"))]
    rate = max(other["gflop_s"] for other in same)
    peak = peak_of(point["format"])
    bounds = {**point["limits"], FIELDS[peak]: rate}
    share, limit = share_of_limit(point["ms"], point["weight_bytes"], point["operations"], peak, bounds)
    return share, f"{limit} bound, {rate:.0f} G/s reached"


def two_threads(target: Target, point: Document, run: Document) -> Value | None:
    if point["limit"] == "read":
        return None
    for other in run["points"]:
        if other["threads"] == 1 and all(other[key] == point[key] for key in ("shape", "format", "tokens")):
            return other["ms"] / point["ms"], f"{other['ms']:.1f} ms with one"
    return None


def step_against_llama(target: Target, step: Document, run: Document) -> Value | None:
    """llama.cpp's time for as many layers, divided by ours for a whole step."""
    for peer in run["peers"]:
        same = peer["shape"] == step["shape"] and peer["threads"] == step["threads"] and peer["tokens"] == 1
        if same and peer["peer"] == "llama.cpp" and peer["format"] == step["format"]:
            return step["layers"] * peer["ms"] / step["ms"], f"llama.cpp {step['layers']} x {peer['ms']:.2f} ms"
    return None


OF_POINTS: dict[str, Callable[[Target, Document, Document], Value | None]] = {
    "read_share": read_share,
    "peak_share": peak_share,
    "against_peers": against_peers,
    "no_dip": no_dip,
    "two_threads": two_threads,
}
OF_STEPS = {"step_against_llama": step_against_llama}


def title_of(record: Mapping[str, Any]) -> str:
    tokens = f", {record['tokens']} tokens" if "tokens" in record else ""
    return f"{record['shape']} {record['format']}{tokens}, {record['threads']} threads"


def verdicts_of(target: Target, run: Document) -> Iterator[Verdict]:
    measure = OF_STEPS.get(target.measure) or OF_POINTS[target.measure]
    records = run["steps"] if target.measure in OF_STEPS else run["points"]
    for record in records:
        if target.covers(record) and (found := measure(target, record, run)) is not None:
            yield Verdict(target.name, title_of(record), found[0], target.at_least, found[1])


def judge(targets: Sequence[Target], run: Document) -> tuple[list[Verdict], list[str]]:
    """(all verdicts, names of the targets that no point of this run could tell)."""
    by_target = {target.name: list(verdicts_of(target, run)) for target in targets}
    verdicts = [verdict for found in by_target.values() for verdict in found]
    return verdicts, [name for name, found in by_target.items() if not found]


def last_line(verdicts: Sequence[Verdict], unknown: Sequence[str]) -> str:
    """One line for people: what falls short, or that nothing does."""
    short = [verdict for verdict in verdicts if not verdict.met]
    missing = f"; not measured: {'; '.join(unknown)}" if unknown else ""
    if not short:
        return f"bench: nothing falls short in {len(verdicts)} comparisons{missing}"
    parts = []
    for name in dict.fromkeys(verdict.target for verdict in short):
        mine = [verdict for verdict in short if verdict.target == name]
        worst = min(mine, key=lambda verdict: verdict.value / verdict.at_least)
        parts.append(f"{name} ({len(mine)}, worst {worst.value:.2f} of {worst.at_least:g} at {worst.point})")
    return f"bench: {len(short)} of {len(verdicts)} comparisons fall short: {'; '.join(parts)}{missing}"
