"""Writes what is generated from the configuration's schema: etc/syshaxd.toml and docs/CONFIG.md.

Owns their form; every word about a key is the schema's, and `key_tables()` gives it to any other document.
`python -m syshaxd.config_docs [DIRECTORY]` writes both below the directory (default: here), `make check` compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syshaxd.config import ENVIRONMENT, Config, ModelConfig, Section, live_keys
from syshaxd.settings import example_toml

_EXAMPLE_HEADING = """\
Configuration of syshaxd. Every key is here with its default; docs/CONFIG.md says the same with types.
Files in syshaxd.toml.d/*.toml are read after this one, in the order of their names; what
`syshaxctl config set` keeps (in the state directory) comes last. Later values win, key by key.
Sizes are bytes, or text such as "64GiB"; where another unit counts, the description names it.
Check with: syshaxd --check-config. Reload with: systemctl reload syshaxd.
"""

_MANUAL_HEADING = """\
# Configuration of syshaxd

Generated from `daemon/config.py`; do not edit (`python -m syshaxd.config_docs`).

Files, in the order in which they are read; later values win, key by key:

1. `/etc/syshax/syshaxd.toml`, or the file given with `--config`
2. beside it `syshaxd.toml.d/*.toml`, in the order of their names
3. `overrides.toml` in the state directory (`/var/lib/syshax`, with `--user` `~/.local/state/syshax`, or `--state-dir`),
   written by `syshaxctl config set` only
4. environment variables, for one start: the table below

`syshaxctl config show --origin` tells for every key which of them its value in force came from, with file and line.

An unknown key, a wrong type or a value out of bounds is an error that names file, key, value and the nearest valid key;
nothing is guessed. `syshaxd --check-config` checks all files, the ISA cap, formats, operator libraries and the plan of
nodes and threads, and exits with 0 or 2. `systemctl reload` (SIGHUP) and `syshaxctl config reload` read the files
again: live keys take effect at once, the others are named as waiting for a restart. Sizes are bytes, or text such as
`"512MiB"`, `"64GiB"`, `"20GB"`; CPU lists are text such as `"0-3,8"`, or lists of numbers.

Variables that are set and not empty win over every file:
"""


@dataclass(frozen=True)
class KeyRow:
    """One key as every document tells it."""

    name: str
    kind: str
    """Type and bounds, in words; Markdown's backquotes around the values of a choice."""
    default: str
    """As it is written in the file; "required" or "left out" where there is none."""
    live: bool
    text: str


@dataclass(frozen=True)
class KeyTable:
    """One table of the file: compute, ..., models.NAME."""

    name: str
    about: str
    rows: tuple[KeyRow, ...]


def key_tables() -> list[KeyTable]:
    """The whole schema in order: what docs/CONFIG.md and syshaxd.toml(5) are made from."""
    tables: dict[str, list[KeyRow]] = {}
    for key, field, live in live_keys():
        section, name = key.rsplit(".", 1)
        kind = _kind(_table(section).model_json_schema(mode="validation")["properties"][name])
        default = "required" if field.is_required() else _toml(field.default)
        text = (field.description or "").removesuffix(" Live.").removesuffix(" Needs a restart.")
        tables.setdefault(section, []).append(KeyRow(name, kind, default, live, text))
    return [
        KeyTable(section, " ".join((_table(section).__doc__ or "").split()), tuple(rows))
        for section, rows in tables.items()
    ]


def _table(section: str) -> type[Section]:
    table = ModelConfig if section == "models.NAME" else Config.model_fields[section].annotation
    assert isinstance(table, type) and issubclass(table, Section)
    return table


def config_markdown() -> str:
    """docs/CONFIG.md."""
    lines = [_MANUAL_HEADING, "| Variable | Key |", "| --- | --- |"]
    lines += [*(f"| `{variable}` | `{key}` |" for variable, key in ENVIRONMENT.items()), ""]
    for table in key_tables():
        lines += [f"## [{table.name}]", "", table.about, "", "| Key | Type | Default | Takes effect | Meaning |"]
        lines += ["| --- | --- | --- | --- | --- |", *map(_markdown_row, table.rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_row(row: KeyRow) -> str:
    default = row.default if row.default == "required" else f"`{row.default}`"
    text = row.text.replace("|", "\\|")
    return f"| `{row.name}` | {row.kind} | {default} | {'live' if row.live else 'restart'} | {text} |"


def _toml(value: Any) -> str:
    if value is None:
        return "left out"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _kind(schema: Mapping[str, Any]) -> str:
    """Type and bounds of a JSON schema's property, in words."""
    if "anyOf" in schema:
        return _kind(next(option for option in schema["anyOf"] if option.get("type") != "null"))
    if "enum" in schema:
        return " ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of: {_kind(schema.get('items', {}))}"
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "size": "size",
        "cpus": "CPUs",
        "share": "size or part",
    }
    word = words.get(str(schema.get("type")), "text")
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is None:
        return word
    return f"{word}, {low} to {high}" if high is not None else f"{word} from {low}"


DOCUMENTS: dict[str, Callable[[], str]] = {
    "etc/syshaxd.toml": lambda: example_toml(Config, _EXAMPLE_HEADING),
    "docs/CONFIG.md": config_markdown,
}


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
    for name, make in DOCUMENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(make())
        print(root / name)


if __name__ == "__main__":
    main()
