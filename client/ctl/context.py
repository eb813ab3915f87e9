"""What the global options of syshaxctl say, and how an answer gets to standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType

from syshax.control import Control

M = TypeVar("M", bound=BaseModel)
_PIPE_WIDTH = 160
"""Where no terminal and no COLUMNS say otherwise: lines stay whole for grep and awk."""


@dataclass
class Context:
    """What the global options say."""

    control: Control
    """Of the daemon."""
    front: Control
    """Of syshax-api."""
    json: bool

    def show(self, answer: M, screen: Callable[[M], RenderableType]) -> None:
        """Prints the message for a program or a person."""
        if self.json:
            print(answer.model_dump_json(indent=2))
        else:
            show_screen(screen(answer))

    def say(self, text: str) -> None:
        """One line for a person."""
        if not self.json:
            print(text)


def context_of(context: typer.Context) -> Context:
    assert isinstance(context.obj, Context)
    return context.obj


def show_screen(what: RenderableType) -> None:
    """On standard output; where that is no terminal, without the blanks that fill a table's lines."""
    console = console_on(stderr=False)
    if console.is_terminal:
        console.print(what, highlight=False)
        return
    with console.capture() as capture:
        console.print(what, highlight=False)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def console_on(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, emoji=False, markup=False)
