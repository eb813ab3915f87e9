"""The worker's own settings: where the daemon is, what the model is called there, and how long to wait.

Two sources, the first wins: `--additional-config '{"syshax": {...}}'` of vLLM, then environment variables (which
syshax-worker sets, and which every process of a server inherits). Unknown names are refused with the nearest known
one. Must not import vllm or torch: the launcher reads it too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from syshax.errors import ConfigError
from syshax.protocol import Address, Name, Priority, WeightFormat

PREFIX = "SYSHAX_WORKER_"
RUNTIME_DIR = "SYSHAX_RUNTIME_DIR"
SECTION = "syshax"


class WorkerSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    runtime_dir: str | None = None
    """Directory of the daemon's sockets; None: /run/syshax."""
    model: Name | None = None
    """The model's name in the daemon; None: the one there with this checkpoint's path, else the directory's name."""
    format: WeightFormat | None = None
    """Asked for when the daemon does not hold the model yet; None: the daemon's default."""
    priority: Priority = Priority.NORMAL
    address: Address = ""
    """Where this worker's vLLM answers, told to the daemon; syshax-worker knows it. Empty: not told."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """For one layer of one batch. A daemon that died is noticed at once; this is for one that hangs."""
    reconnect_s: float = Field(default=180.0, ge=0)
    """How long a request waits for a lost daemon to come back with the model."""
    load_timeout_s: float = Field(default=3600.0, gt=0)
    """How long a starting worker waits until the daemon has loaded the model."""


def settings_from(additional_config: Mapping[str, Any], environment: Mapping[str, str]) -> WorkerSettings:
    """Raises ConfigError naming the source, the key and the nearest known key."""
    section = additional_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'--additional-config: "{SECTION}" must be an object, not {section!r}')
    values: dict[str, Any] = {}
    if environment.get(RUNTIME_DIR):
        values["runtime_dir"] = environment[RUNTIME_DIR]
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and value:
            values[_known(variable.removeprefix(PREFIX).lower(), f"${variable}")] = value
    for key, value in section.items():
        values[_known(key, f"--additional-config: {SECTION}.{key}")] = value
    try:
        return WorkerSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"setting {key} of the syshax worker is {first['input']!r}: {first['msg']}",
            f"the settings are {', '.join(WorkerSettings.model_fields)}",
        ) from None


def environment_of(settings: WorkerSettings) -> dict[str, str]:
    """The variables from which `settings_from` makes these settings again."""
    changed = settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {RUNTIME_DIR if key == "runtime_dir" else PREFIX + key.upper(): str(value) for key, value in changed.items()}


def _known(key: str, where: str) -> str:
    if key in WorkerSettings.model_fields:
        return key
    near = difflib.get_close_matches(key, WorkerSettings.model_fields, 1, 0.0)[0]
    raise ConfigError(f"{where} is not a setting of the syshax worker", f"did you mean {near}?")
