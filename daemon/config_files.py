"""Where syshaxd's configuration lies: the administrator's file, its drop-ins, and the state file of `config set`.

Owns the order of these layers, the few environment variables that win over them, the state file (written in one step,
never the administrator's), and dotted keys. How files are read and errors worded is settings.py's, what is valid is
config.py's, where a value came from is told by origins.py.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from syshax.ctl.values import toml_or_text
from syshax.errors import ConfigError
from syshaxd.config import ENVIRONMENT, Config
from syshaxd.origins import ENVIRONMENT_SOURCE, STATE_SOURCE
from syshaxd.settings import Layer, build, flatten, nearest_key, read_toml, with_drop_ins

DEFAULT_CONFIG = Path("/etc/syshax/syshaxd.toml")
STATE_FILE = "overrides.toml"


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, which file ("state" for the state file) set which dotted key, and the state's keys."""

    config: Config
    sources: dict[str, str]
    overrides: dict[str, Any]


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
        kept = self.state_file is not None and self.state_file.exists()
        return self._build(read_toml(self.state_file).values if kept and self.state_file else {})

    def preview(self, overrides: Mapping[str, Any]) -> Loaded:
        """What `load` would give if the state file held these dotted keys."""
        return self._build(unflatten(overrides))

    def save_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Replaces the state file in one step: a crash leaves the old one or the new one."""
        if self.state_file is None or self.state_dir is None:
            raise ConfigError("there is no state directory to keep changes in", "start syshaxd with --state-dir")
        text = "# Written by `syshaxctl config set`; it wins over the administrator's files.\n"
        text += tomli_w.dumps(unflatten(overrides))
        try:
            self.state_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.state_dir, prefix=".overrides.", delete=False) as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(stream.name).replace(self.state_file)
        except OSError as error:
            raise ConfigError(f"{self.state_file}: the change cannot be kept: {error.strerror}") from error

    def _build(self, state: Mapping[str, Any]) -> Loaded:
        files = [self.main] if self.required else []
        files += [file for file in with_drop_ins(self.main) if file not in files]
        layers = [*(read_toml(file) for file in files), Layer(STATE_SOURCE, state), *environment_layers(os.environ)]
        config, sources = build(Config, layers)
        return Loaded(config, sources, dict(flatten(state)))


def environment_layers(environment: Mapping[str, str]) -> list[Layer]:
    """One layer for each variable of config.ENVIRONMENT that is set and not empty; values are TOML, or bare words."""
    layers = []
    for variable, key in ENVIRONMENT.items():
        if text := environment.get(variable):
            layers.append(Layer(f"{ENVIRONMENT_SOURCE}{variable}", unflatten({key: toml_or_text(text)})))
    return layers


def split_key(key: str) -> list[str]:
    """Tables and name of a dotted key; a model's name may hold dots itself. Raises ConfigError for what is no key."""
    parts = key.split(".")
    if parts[0] == "models" and len(parts) >= 3:
        parts = ["models", ".".join(parts[1:-1]), parts[-1]]
    if len(parts) < 2 or not all(parts):
        near = nearest_key(Config, parts)
        raise ConfigError(f"{key!r} is not a key", f"nearest valid key: {near}" if near else "keys are TABLE.NAME")
    return parts


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
