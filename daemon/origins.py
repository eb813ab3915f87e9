"""Where each value of the configuration came from: a file and its line, a drop-in, the state file, a variable, nothing.

Owns finding a key's line (tomllib gives none) and the words for sources. It reads no value: settings.py does that.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from syshax.protocol import Origin
from syshaxd.settings import flatten

STATE_SOURCE = "state"
ENVIRONMENT_SOURCE = "environment "
"""Before the variable's name, as a layer's source."""


def key_lines(text: str) -> dict[str, int]:
    """Dotted key -> line (from 1) on which its assignment begins, of a valid TOML document.

    tomllib itself says where an assignment ends: lines are added to it until they parse below their table's header.
    """
    found: dict[str, int] = {}
    header = ""
    pending: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        pending.append(line)
        statement = "\n".join(pending)
        is_header = statement.lstrip().startswith("[")
        try:
            values = tomllib.loads(statement if is_header else f"{header}\n{statement}")
        except tomllib.TOMLDecodeError:
            continue
        first = number - len(pending) + 1
        pending = []
        if is_header:
            header = statement
        elif statement.strip():
            found.update((key, first) for key, value in flatten(values) if value != {} and key not in found)
    return found


def file_lines(file: Path) -> dict[str, int]:
    """`key_lines` of a file; empty where it cannot be read any more."""
    try:
        return key_lines(file.read_text())
    except (OSError, UnicodeDecodeError):
        return {}


def origin_of(source: str | None, line: int | None, main: Path, state_file: Path | None) -> Origin:
    """A layer's source (None: no layer set the key) in the control API's words."""
    if source is None:
        return Origin(kind="default")
    if source == STATE_SOURCE:
        return Origin(kind="state", where=str(state_file or ""), line=line)
    if source.startswith(ENVIRONMENT_SOURCE):
        return Origin(kind="environment", where=source.removeprefix(ENVIRONMENT_SOURCE))
    drop_in = Path(source).parent == Path(f"{main}.d")
    return Origin(kind="drop-in" if drop_in else "file", where=source, line=line)


def origins(
    keys: Mapping[str, object], sources: Mapping[str, str], main: Path, state_file: Path | None
) -> dict[str, Origin]:
    """The origin of every one of these dotted keys; reads the files for their lines."""
    files = {source: Path(source) for source in sources.values() if source.startswith("/")}
    if state_file is not None:
        files[STATE_SOURCE] = state_file
    lines = {source: file_lines(file) for source, file in files.items()}
    return {
        key: origin_of(source := sources.get(key), lines.get(source or "", {}).get(key), main, state_file)
        for key in keys
    }
