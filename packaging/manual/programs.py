"""The options and commands of syshax's programs as one plain tree, read from the programs' own parsers.

Owns how typer's and argparse's tables are read; man pages and completions are both made from this tree, so that
neither can say something else than `--help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.core
import typer.main

from syshax.ctl.__main__ import app as ctl
from syshax.vllm.launcher import parser as worker_parser
from syshaxd.__main__ import app as daemon
from syshaxd.frontend.__main__ import app as api


@dataclass(frozen=True)
class Option:
    """`value` is what stands for its value ("" for a flag); `files`: the value is a path."""

    names: tuple[str, ...]
    value: str
    about: str
    files: bool = False


@dataclass(frozen=True)
class Argument:
    name: str
    about: str
    required: bool
    files: bool


@dataclass
class Program:
    """A program, or a command of one."""

    name: str
    about: str
    options: list[Option] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    commands: list[Program] = field(default_factory=list)

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Program]]:
        """(words after the program's name, command) of every command, in the order of `--help`."""
        for command in self.commands:
            words = f"{prefix} {command.name}".strip()
            yield words, command
            yield from command.walk(words)


_HELP = Option(("--help",), "", "Print the options and leave.")
_PLACEHOLDERS = {Path: "PATH", int: "NUMBER", float: "NUMBER"}


def _annotation(parameter: Any) -> Any:
    return parameter.type_descriptor.annotation


def _sentence(parameter: Any) -> str:
    """The help text, and the default where `--help` shows one."""
    text = " ".join((parameter.help or "").split())
    default = parameter.default
    shown = parameter.show_default and not getattr(parameter, "is_flag", False) and default not in (None, "", [], ())
    if shown:
        text += f" Default: {', '.join(map(str, default)) if isinstance(default, list | tuple) else default}."
    if parameter.envvar:
        text += f" Environment: {parameter.envvar}."
    return text


def from_typer(command: Any, name: str) -> Program:
    made = Program(name, " ".join((command.help or "").split()))
    for parameter in command.params:
        if parameter.hidden:
            continue
        kind = _annotation(parameter)
        if isinstance(parameter, typer.core.TyperOption):
            value = "" if parameter.is_flag else parameter.metavar or _PLACEHOLDERS.get(kind, "TEXT")
            names = (*parameter.opts, *parameter.secondary_opts)
            made.options.append(Option(names, value, _sentence(parameter), kind is Path))
        else:
            shown = parameter.metavar or parameter.name.upper()
            made.arguments.append(Argument(shown, _sentence(parameter), parameter.required, kind is Path))
    made.options.append(_HELP)
    for key in command.list_commands(None) if hasattr(command, "list_commands") else ():
        inner = command.get_command(None, key)
        if not inner.hidden:
            made.commands.append(from_typer(inner, key))
    return made


def from_argparse(parser: argparse.ArgumentParser) -> Program:
    made = Program(parser.prog, " ".join((parser.description or "").split()))
    for action in parser._actions:
        names = tuple(name for name in action.option_strings if name.startswith("--"))
        if names == ("--help",):
            continue
        value = "" if action.nargs == 0 else str(action.metavar)
        made.options.append(
            Option(names, value, f"{str(action.help)[:1].upper()}{str(action.help)[1:]}.", value == "DIR")
        )
    made.options.append(_HELP)
    made.arguments.append(Argument("MODEL", "A checkpoint directory, or a repository's name.", True, True))
    return made


def programs() -> dict[str, Program]:
    """Every program of the package under its name."""
    made = {name: from_typer(typer.main.get_command(app), name) for name, app in _TYPER.items()}
    return {**made, "syshax-worker": from_argparse(worker_parser())}


_TYPER = {"syshaxctl": ctl, "syshaxd": daemon, "syshax-api": api}
