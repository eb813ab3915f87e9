"""What stays of a run of `syshaxd bench api`: a JSON document, a table and a plot."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from syshaxd.bench.api import bound_text
from syshaxd.bench.reports import write_record

COLOURS = {"direct": "#888888", "bare": "#1f5fa8", "ours": "#c2571a"}
NAMES = {"direct": "worker alone", "bare": "bare pass-through", "ours": "syshax-api"}


def write(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files written; no plot where matplotlib is not installed."""
    return write_record(document, folder, "api", plot)


def table(document: Mapping[str, Any]) -> Table:
    """One row for each target: what is asked, what was found, what it stands beside."""
    result = Table("target", title="syshax-api beside a bare pass-through")
    for heading in ("asked", "found", "", "beside it"):
        result.add_column(heading, justify="left" if heading in ("", "beside it") else "right")
    for verdict in document["verdicts"]:
        beside = ", ".join(f"{name} {value:.4g}" for name, value in verdict["beside"].items())
        met = "met" if verdict["met"] else "falls short"
        result.add_row(verdict["target"], bound_text(verdict), f"{verdict['value']:.3g}", met, beside)
    return result


def plot(document: Mapping[str, Any], file: Path) -> None:
    """A panel for each part that was measured; single rounds are marks, medians are lines or bars."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    rounds = document["rounds"]
    parts = [part for part in PANELS if rounds.get(part)]
    columns = min(3, max(1, len(parts)))
    rows = -(-len(parts) // columns) or 1
    figure, axes = pyplot.subplots(rows, columns, figsize=(5.6 * columns, 4.4 * rows), squeeze=False)
    flat = [axis for row in axes for axis in row]
    for axis, part in zip(flat, parts, strict=False):
        PANELS[part](axis, rounds[part])
    for axis in flat[len(parts) :]:
        axis.set_visible(False)
    busy = "" if document["quiet"] else f", other programs kept {document['others']:.1f} CPUs busy"
    figure.suptitle(f"{document['started'][:16]}{busy}", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def draw_latency(axis: Any, rounds: list[dict[str, Any]]) -> None:
    for number, found in enumerate(rounds):
        lines = {"direct": found["bare"]["direct"], **{name: found[name][name] for name in ("bare", "ours")}}
        for name, line in lines.items():
            parts = [100 * index / (len(line["curve_ms"]) - 1) for index in range(len(line["curve_ms"]))]
            label = NAMES[name] if not number else None
            axis.plot(line["curve_ms"], parts, color=COLOURS[name], linewidth=1, alpha=0.7, label=label)
    axis.set_xscale("log")
    axis.set_xlabel("ms from the intended moment to the whole answer")
    axis.set_ylabel("% of requests")
    axis.set_title("200 requests/s, open loop, each round")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def draw_rounds(field: str, title: str, unit: str, scale: float = 1.0) -> Any:
    """Rounds side by side, each a pair of marks."""

    def draw(axis: Any, rounds: list[dict[str, Any]]) -> None:
        for name in ("bare", "ours"):
            values = [found[name][field] * scale for found in rounds]
            axis.plot(range(1, len(values) + 1), values, "-o", color=COLOURS[name], label=NAMES[name], linewidth=1)
        axis.set_ylim(bottom=0)
        axis.set_xticks(range(1, len(rounds) + 1))
        axis.set_xlabel("round")
        axis.set_ylabel(unit)
        axis.set_title(title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)

    return draw


def draw_many(axis: Any, rounds: list[dict[str, Any]]) -> None:
    bars = {"gaps' p50, ms": "gap_p50_ms", "gaps' p99, ms": "gap_p99_ms", "memory, MiB": "resident_mib"}
    for offset, name in ((-0.2, "bare"), (0.2, "ours")):
        heights = [max(found[name][field] for found in rounds) for field in bars.values()]
        places = [index + offset for index in range(len(bars))]
        drawn = axis.bar(places, heights, width=0.38, color=COLOURS[name], label=NAMES[name])
        axis.bar_label(drawn, fmt="%.0f", fontsize=8)
    axis.axhline(120, color="grey", linestyle=":", linewidth=1)
    axis.set_xticks(range(len(bars)), list(bars))
    axis.set_title("2,000 streams, an event each 20 ms (dotted: asked)")
    axis.legend(fontsize=8)


def draw_processes(axis: Any, rounds: list[dict[str, Any]]) -> None:
    for name in ("bare", "ours"):
        ratios = [found[f"{name}_2"]["per_second"] / found[f"{name}_1"]["per_second"] for found in rounds]
        axis.plot(range(1, len(ratios) + 1), ratios, "-o", color=COLOURS[name], label=NAMES[name], linewidth=1)
    axis.axhline(1.7, color="grey", linestyle=":", linewidth=1)
    axis.set_ylim(bottom=0)
    axis.set_xticks(range(1, len(rounds) + 1))
    axis.set_xlabel("round")
    axis.set_ylabel("requests/s of two over one")
    axis.set_title("two processes against one (dotted: asked)")
    axis.legend(fontsize=8)


PANELS = {
    "latency": draw_latency,
    "closed": draw_rounds("per_second", "closed loop, 32 connections", "requests/s"),
    "full": draw_rounds("events_per_second", "32 streams at full speed", "1,000 events/s", 1e-3),
    "paced": draw_rounds("cpu_us", "CPU time of an event, 300 streams", "µs"),
    "many": draw_many,
    "processes": draw_processes,
}
