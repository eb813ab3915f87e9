"""The command line of `syshaxd operators`: what an author of an operator library needs, without a running daemon."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from syshaxd.operators.checking import Record, check_library

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)
_STYLES = {"passed": "green", "failed": "bold red", "not run": "yellow"}


@app.callback()
def operators() -> None:
    """Operator libraries: formats and kernels from outside (docs/OPERATORS.md)."""


@app.command()
def check(
    library: Annotated[Path, typer.Argument(help="The shared library.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Check a library as the daemon does when it starts, then its formats and kernels against what they promise.

    Exit status: 0 when every check that could be run passed, 1 otherwise.
    """
    console = Console(highlight=False, soft_wrap=True)
    count: Counter[str] = Counter()
    for record in check_library(library):
        count[record["state"]] += 1
        if as_json:
            print(json.dumps(record), flush=True)
        else:
            console.print(line_of(record))
    if not as_json:
        console.print(", ".join(f"{number} {state}" for state, number in count.items()))
    raise typer.Exit(1 if count["failed"] else 0)


def line_of(record: Record) -> Text:
    state = record["state"]
    return Text.assemble((f"{state:8}", _STYLES[state]), f"{record['row']:28} {record['check']:12} ", record["text"])
