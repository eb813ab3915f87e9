"""From files to one checked Config: the main file, its drop-ins, the state file of `config set`; and back.

Owns reading, merging (later files win, key by key), remembering which file set which key, and the wording of every
configuration error: file, key, value seen, what is allowed, nearest valid key. What is valid is config.py's.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from syshax.errors import ConfigError
from syshaxd.config import Config, KeyRow, flatten, key_rows

DEFAULT_CONFIG = Path("/etc/syshax/syshaxd.toml")
STATE_FILE = "overrides.toml"
_MAX_FILE_BYTES = 4 << 20
_ROWS: dict[str, KeyRow] = {row.key: row for row in key_rows()}


@dataclass(frozen=True)
class Loaded:
    """A valid configuration and where it comes from."""

    config: Config
    sources: dict[str, str]
    """Dotted key -> file, or "state"; defaults are left out."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """The state file's dotted keys."""


@dataclass(frozen=True)
class ConfigFiles:
    """The places a configuration is read from. `required`: the main file was named on the command line."""

    main: Path = DEFAULT_CONFIG
    required: bool = False
    state_dir: Path | None = None

    @property
    def state_file(self) -> Path | None:
        return self.state_dir / STATE_FILE if self.state_dir else None

    def load(self) -> Loaded:
        """Reads and checks everything. Raises ConfigError; nothing half-valid comes back."""
        return self._checked(self._state_values())

    def preview(self, overrides: Mapping[str, Any]) -> Loaded:
        """What `load` would give if the state file held these dotted keys."""
        return self._checked(unflatten(overrides))

    def save_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Replaces the state file in one step; a crash leaves the old one or the new one."""
        if self.state_file is None or self.state_dir is None:
            raise ConfigError("there is no state directory to keep changes in", "start syshaxd with --state-dir")
        text = "# Written by `syshaxctl config set`; it wins over the administrator's files.\n" + tomli_w.dumps(
            unflatten(overrides)
        )
        try:
            self.state_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.state_dir, prefix=".overrides.", delete=False) as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(stream.name).replace(self.state_file)
        except OSError as error:
            raise ConfigError(f"{self.state_file}: the change cannot be kept: {error.strerror}") from error

    def _checked(self, state: Mapping[str, Any]) -> Loaded:
        merged: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for file in self._files():
            _merge(merged, read_toml(file), str(file), sources)
        _merge(merged, state, "state", sources)
        named = sources | {key: str(self.state_file) for key, source in sources.items() if source == "state"}
        try:
            config = Config.model_validate(merged)
        except ValidationError as error:
            raise _config_error(error, named) from None
        used = {key: source for key, source in sources.items() if key in flatten(merged)}
        return Loaded(config, used, flatten(state))

    def _files(self) -> list[Path]:
        drop_ins = self.main.with_name(self.main.name + ".d")
        try:
            found = sorted(file for file in drop_ins.iterdir() if file.suffix == ".toml") if drop_ins.exists() else []
            exists = self.main.exists()
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        if not exists and self.required:
            raise ConfigError(f"{self.main}: there is no such file")
        return ([self.main] if exists else []) + found

    def _state_values(self) -> dict[str, Any]:
        if self.state_file is None:
            return {}
        try:
            return read_toml(self.state_file) if self.state_file.exists() else {}
        except OSError as error:
            raise ConfigError(f"{self.state_file}: {error.strerror}") from error


def read_toml(file: Path) -> dict[str, Any]:
    """One file's tables. Raises ConfigError with file and line."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{file}: larger than {_MAX_FILE_BYTES >> 20} MiB: not a configuration")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{line}: not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        match = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", str(error))
        reason = str(error)[: match.start()] if match else str(error)
        line = int(match[1]) if match and match[1] else data.count(b"\n") + 1
        raise ConfigError(f"{file}:{line}: {reason}", "the file is TOML: https://toml.io") from None


def split_key(key: str) -> tuple[str, ...]:
    """The tables and the name of a dotted key; a model's name may hold dots itself. Raises ConfigError."""
    parts = key.split(".")
    if parts[0] == "models" and len(parts) >= 3:
        parts = ["models", ".".join(parts[1:-1]), parts[-1]]
    if not all(parts) or len(parts) < 2:
        raise ConfigError(f"{key!r} is not a key of the configuration", _nearest(key))
    return tuple(parts)


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys to nested tables."""
    nested: dict[str, Any] = {}
    for key in sorted(flat):
        *tables, name = split_key(key)
        table = nested
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = flat[key]
    return nested


def _merge(into: dict[str, Any], values: Mapping[str, Any], source: str, sources: dict[str, str], at: str = "") -> None:
    for key, value in values.items():
        dotted = f"{at}{key}"
        if isinstance(value, Mapping):
            table = into.get(key)
            if not isinstance(table, dict):
                table = into[key] = {}
            sources.setdefault(f"{dotted}.", source)
            _merge(table, value, source, sources, f"{dotted}.")
        else:
            into[key] = value
            sources[dotted] = source


def _config_error(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """All faults in one message, a line each."""
    return ConfigError("\n".join(_describe(detail, sources) for detail in error.errors(include_url=False)))


def _describe(detail: ErrorDetails, sources: Mapping[str, str]) -> str:
    location = [str(part) for part in detail["loc"]]
    kind = detail["type"]
    if location[-1] == "[key]":
        name = location[-2]
        where = _source_of(["models", name], sources)
        return f"{where}: models: {name!r} is no name for a model (letters, digits, '.', '_' and '-', at most 128)"
    entry = f"[{location.pop()}]" if kind != "extra_forbidden" and location[-1].isdigit() and len(location) > 2 else ""
    where, key = _source_of(location, sources), ".".join(location)
    if kind == "extra_forbidden":
        return f"{where}: unknown key {key} ({_nearest(key)})"
    row = _ROWS.get(f"models.NAME.{location[-1]}" if location[0] == "models" and len(location) > 2 else key)
    if kind == "missing":
        return f"{where}: {key} is missing" + (f" ({row.description})" if row else "")
    if row is None:
        return f"{where}: {key} = {detail['input']!r}: expected a table, [{key}]"
    message = detail["msg"].removeprefix("Value error, ")
    if message.startswith(("Input should", "String should")):
        message = f"expected {row.kind}"
    elif kind == "too_short":
        message = "expected at least one entry"
    return f"{where}: {key}{entry} = {detail['input']!r}: {message}"


def _source_of(location: list[str], sources: Mapping[str, str]) -> str:
    """The file that set a key, or else (a missing key, a table) the one that set something beneath or above it."""
    for length in range(len(location), 0, -1):
        key = ".".join(location[:length])
        if key in sources:
            return sources[key]
        beneath = [source for name, source in sources.items() if name.startswith(f"{key}.")]
        if beneath:
            return beneath[-1]
    return "configuration"


def _nearest(key: str) -> str:
    """Names the nearest valid key: in the same table first, then the same last word anywhere, then anything alike."""
    parts = key.split(".")
    in_model = parts[0] == "models" and len(parts) > 2
    table = "models.NAME" if in_model else ".".join(parts[:-1])
    candidates = {row.rsplit(".", 1)[1]: row for row in _ROWS if row.rsplit(".", 1)[0] == table}
    near = difflib.get_close_matches(parts[-1], candidates, 1, 0.6)
    if near:
        best = candidates[near[0]]
        return f"did you mean {best.replace('models.NAME', '.'.join(parts[:-1])) if in_model else best}?"
    tables = sorted({row.split(".")[0] for row in _ROWS})
    if len(parts) == 1 and (near := difflib.get_close_matches(parts[0], tables, 1, 0.6)):
        return f"did you mean [{near[0]}]?"
    elsewhere = [row for row in _ROWS if row.rsplit(".", 1)[1] == parts[-1]]
    best = (elsewhere or difflib.get_close_matches(key, _ROWS, 1, 0.4) or [""])[0]
    return f"did you mean {best}?" if best else f"tables are {', '.join(tables)}"
