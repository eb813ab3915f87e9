"""Writes the man pages and the shell completions.

    python packaging/manual OUT

OUT/man/ gets one page for each docs/man/*.md, OUT/completions/{bash,zsh,fish}/ one file for each program. A page's
prose is its Markdown file; what changes with the code is filled in:

    {{options PROGRAM}}         the program's options
    {{commands PROGRAM}}        every command with its arguments and options
    {{section FILE HEADING}}    a section of another document
    {{configuration}}           the keys, from what docs/CONFIG.md is made of

The date is SOURCE_DATE_EPOCH's, where it is set.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import completions
import roff
from programs import Option, Program, programs

from syshaxd.config_docs import config_markdown
from syshaxd.status import version

ROOT = Path(__file__).resolve().parent.parent.parent
_PLACEHOLDER = re.compile(r"\{\{(\w+) ?(.*?)\}\}")
_COMPLETIONS = {
    "bash": (completions.bash, "{}"),
    "zsh": (completions.zsh, "_{}"),
    "fish": (completions.fish, "{}.fish"),
}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def option_rows(options: list[Option]) -> list[str]:
    rows = []
    for option in options:
        value = f" *{option.value}*" if option.value else ""
        names = ", ".join(f"`{name}`" for name in option.names)
        rows.append(f"| {names}{value} | {_cell(option.about)} |")
    return ["| Option | Meaning |", "| --- | --- |", *rows]


def commands(program: Program) -> str:
    """A subsection for each command that does something."""
    lines: list[str] = []
    for words, command in program.walk():
        if command.commands:
            continue
        arguments = [one.name if one.required else f"[{one.name}]" for one in command.arguments]
        options = [option for option in command.options if option.names != ("--help",)]
        lines += [f"### {' '.join([words, *arguments, *(['[options]'] if options else [])])}", command.about, ""]
        rows = [f"| `{one.name}` | {_cell(one.about)} |" for one in command.arguments if one.about]
        rows += option_rows(options)[2:]
        lines += ["| Option | Meaning |", "| --- | --- |", *rows, ""] if rows else []
    return "\n".join(lines)


def filled(source: str, known: dict[str, Program]) -> str:
    """The page's Markdown with everything in its place. Raises KeyError for what does not exist."""

    def fill(match: re.Match[str]) -> str:
        kind, words = match[1], match[2]
        if kind == "options":
            return "\n".join(option_rows(known[words].options))
        if kind == "commands":
            return commands(known[words])
        if kind == "section":
            file, _, heading = words.partition(" ")
            return roff.demoted(roff.section((ROOT / file).read_text(), heading))
        if kind == "configuration":
            keys = config_markdown()
            return roff.demoted(keys[keys.index("\n## ") :])
        raise KeyError(match[0])

    return _PLACEHOLDER.sub(fill, source)


def page(source: Path, known: dict[str, Program]) -> str:
    """man(7) source of docs/man/NAME.SECTION.md."""
    name, _, number = source.stem.rpartition(".")
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", datetime.now(UTC).timestamp())), UTC)
    heading = f'.TH "{name.upper()}" "{number}" "{when:%Y-%m-%d}" "syshax {version()}" "syshax"\n'
    return heading + ".nh\n.ad l\n" + roff.body(filled(source.read_text(), known))


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    known = programs()
    (out / "man").mkdir(parents=True, exist_ok=True)
    for source in sorted((ROOT / "docs/man").glob("*.md")):
        (out / "man" / source.stem).write_text(page(source, known))
    for shell, (render, name) in _COMPLETIONS.items():
        (out / "completions" / shell).mkdir(parents=True, exist_ok=True)
        for program in known.values():
            (out / "completions" / shell / name.format(program.name)).write_text(render(program))
    return 0


if __name__ == "__main__":
    sys.exit(main())
