"""What stays of a run of `syshaxd bench all`: a JSON document and a plot, named after the moment that it began."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from syshax.errors import InvalidArgumentError
from syshaxd.bench.peers import PEERS

Document = Mapping[str, Any]
COLOURS = {"bf16": "#1f5fa8", "fp16": "#7a4fb5", "q8_0": "#c2571a", "q4_0": "#2f8f4e", "int8row": "#8a6d1d"}
PEER_MARKS = dict(zip(PEERS, ("x", "+", "1", "2", "3"), strict=True))
WIDTH_COLOURS = {16: COLOURS["bf16"], 8: COLOURS["q8_0"], 4: COLOURS["q4_0"]}


def prepare(folder: Path) -> None:
    """Makes the folder, before anything is measured. Raises InvalidArgumentError where nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise InvalidArgumentError(f"the record cannot be written: {error}", "name another folder: --output") from error


def write(document: Document, folder: Path) -> list[Path]:
    """The files written; no plot where matplotlib is not installed."""
    return write_record(document, folder, "bench", plot)


def write_record(document: Document, folder: Path, name: str, draw: Callable[[Document, Path], None]) -> list[Path]:
    """NAME-STARTED.json and, where matplotlib is installed, what `draw` makes of it as .png; the files written."""
    stem = f"{name}-" + document["started"].replace(":", "").replace("-", "")
    record = folder / f"{stem}.json"
    record.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        return [record]
    picture = folder / f"{stem}.png"
    draw(document, picture)
    return [record, picture]


def plot(document: Document, file: Path) -> None:
    """Two rows for each shape, a column for each number of threads: shares of the limit, and times beside peers'."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    points = document["points"]
    shapes = list(dict.fromkeys(point["shape"] for point in points))
    threads = sorted({point["threads"] for point in points})
    rows, columns = 2 * len(shapes), len(threads)
    figure, axes = pyplot.subplots(rows, columns, figsize=(7.5 * columns, 4.6 * rows), squeeze=False)
    for i, shape in enumerate(shapes):
        for j, number in enumerate(threads):
            mine = [point for point in points if point["shape"] == shape and point["threads"] == number]
            peers = [peer for peer in document["peers"] if peer["shape"] == shape and peer["threads"] == number]
            title = f"{shape}, {number} thread{'s' if number > 1 else ''}"
            draw_shares(axes[2 * i][j], mine, title)
            draw_times(axes[2 * i + 1][j], mine, peers, title)
    machine = document["machine"]
    busy = "" if document["quiet"] else f", quiet in {document['quiet_part']:.0%} of the figures"
    figure.suptitle(f"{machine['cpu']}, {machine['isa']}, {document['started'][:10]}{busy}", fontsize=13)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def series(points: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for point in sorted(points, key=lambda point: int(point["tokens"])):
        found.setdefault(str(point[key]), []).append(point)
    return found


def legend_below(axis: Any) -> None:
    """Where it hides no mark."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, fontsize=8, frameon=False)


def set_tokens(axis: Any, points: Sequence[Mapping[str, Any]]) -> None:
    tokens = sorted({int(point["tokens"]) for point in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [str(count) for count in tokens])
    axis.minorticks_off()
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3)


def draw_shares(axis: Any, points: Sequence[Mapping[str, Any]], title: str) -> None:
    """A filled mark where reading memory is the limit, an empty one where computing is."""
    for format, line in series(points, "format").items():
        colour = COLOURS.get(format, "black")
        tokens, shares = [point["tokens"] for point in line], [100 * point["limit_share"] for point in line]
        axis.plot(tokens, shares, color=colour, label=format, linewidth=1.6)
        for count, share, point in zip(tokens, shares, line, strict=True):
            filled = colour if point["limit"] == "read" else "white"
            axis.plot(count, share, marker="o", color=colour, markerfacecolor=filled, markersize=6)
    axis.axhline(92, color="grey", linestyle=":", linewidth=1)
    axis.set_ylim(0, 105)
    axis.set_ylabel("% of the limit (● reading, ○ computing)")
    axis.set_title(title)
    legend_below(axis)
    set_tokens(axis, points)


def draw_times(axis: Any, points: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]], title: str) -> None:
    """Peers are single marks in the colour of the width that they are compared in."""
    for format, line in series(points, "format").items():
        times = [point["ms"] for point in line]
        axis.plot(
            [point["tokens"] for point in line],
            times,
            "-o",
            markersize=4,
            color=COLOURS.get(format, "black"),
            label=format,
        )
    labelled: set[str] = set()
    for peer in peers:
        label = f"{peer['peer']} {peer['format']}"
        axis.plot(
            peer["tokens"],
            peer["ms"],
            linestyle="",
            marker=PEER_MARKS[peer["peer"]],
            color=WIDTH_COLOURS[peer["width"]],
            markersize=9,
            markeredgewidth=1.6,
            label=None if label in labelled else label,
        )
        labelled.add(label)
    axis.set_yscale("log")
    axis.set_ylabel("ms for one layer")
    axis.set_title(f"{title}: time, and peers' times" if peers else f"{title}: time")
    legend_below(axis)
    set_tokens(axis, points)
