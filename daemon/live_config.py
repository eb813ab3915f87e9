"""The configuration of the running daemon: what holds now, what was asked for, and the way from one to the other.

Owns reloading and `config set`. Keys that are live take effect at once (whoever needs one reads it from `current` when
it is needed); the others keep the value of the start, and are named as needing a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syshax.errors import ConfigError
from syshax.protocol import ConfigAnswer, ConfigChangeAnswer, Origin, StartOption
from syshaxd.config import Config, is_live, live_keys
from syshaxd.config_files import ConfigFiles, Loaded, split_key
from syshaxd.origins import origins
from syshaxd.settings import flatten, nearest_key


class LiveConfig:
    """`current()` is the configuration in force."""

    def __init__(
        self,
        files: ConfigFiles,
        loaded: Loaded,
        check: Callable[[Config], None],
        options: Sequence[StartOption] = (),
    ) -> None:
        """`check` raises ConfigError for what the schema alone cannot know; `options` are only shown."""
        self._files, self._loaded, self._check = files, loaded, check
        self._start = self._current = loaded.config
        self._options = list(options)
        self._origins = self._start_origins = self._find_origins()

    def current(self) -> Config:
        return self._current

    def reload(self, boot_id: str) -> ConfigChangeAnswer:
        """Reads all files again. Raises ConfigError; then nothing has changed."""
        loaded = self._files.load()
        self._check(loaded.config)
        return self._adopt(loaded, boot_id)

    def set(self, values: Mapping[str, Any], boot_id: str) -> ConfigChangeAnswer:
        """Keeps dotted keys in the state file (None: keeps one no longer) and applies them.

        The files are read again on the way. Raises ConfigError; then nothing has changed.
        """
        overrides = dict(self._loaded.overrides)
        for key, value in values.items():
            self._check_key(key)
            if value is None:
                overrides.pop(key, None)
            else:
                overrides[key] = value
        loaded = self._files.preview(overrides)
        self._check(loaded.config)
        before = _flat(self._loaded.config)
        self._files.save_overrides(overrides)
        answer = self._adopt(loaded, boot_id)
        after = _flat(loaded.config)
        answer.unchanged = [key for key in values if before.get(key) == after.get(key)]
        return answer

    @staticmethod
    def _check_key(key: str) -> None:
        parts = split_key(key)
        try:
            is_live(key)
        except KeyError:
            near = nearest_key(Config, parts)
            raise ConfigError(f"{key}: unknown key", f"nearest valid key: {near}" if near else "") from None

    def _adopt(self, loaded: Loaded, boot_id: str) -> ConfigChangeAnswer:
        before = _flat(self._current)
        self._loaded = loaded
        self._origins = self._find_origins()
        self._current = _with_restart_keys_of(self._start, loaded.config)
        after = _flat(self._current)
        applied = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        waiting = self.needs_restart()
        words = [f"applied: {', '.join(applied)}"] if applied else []
        words += [f"after a restart: {', '.join(waiting)}"] if waiting else []
        return ConfigChangeAnswer(
            boot_id=boot_id, applied=applied, needs_restart=waiting, message="; ".join(words) or "nothing changed"
        )

    def needs_restart(self) -> list[str]:
        """Keys whose configured value is not the running one."""
        running, wanted = _flat(self._start), _flat(self._loaded.config)
        return [key for key, _, live in live_keys() if not live and running[key] != wanted[key]]

    def answer(self, boot_id: str) -> ConfigAnswer:
        return ConfigAnswer(
            boot_id=boot_id,
            effective=self._current.model_dump(mode="json"),
            sources=self._loaded.sources,
            origins={key: self._origin(key) for key, _ in flatten(self._current.model_dump(mode="json"))},
            start=self._options,
            needs_restart=self.needs_restart(),
        )

    def _find_origins(self) -> dict[str, Origin]:
        """Found when the files are read: they may be other ones later."""
        keys = dict(flatten(self._loaded.config.model_dump(mode="json")))
        return origins(keys, self._loaded.sources, self._files.main, self._files.state_file)

    def _origin(self, key: str) -> Origin:
        """Of the value in force: that of a key which needs a restart is the start's."""
        known = self._origins if key == "models" or is_live(key) else self._start_origins
        return known[key]


def _flat(config: Config) -> dict[str, Any]:
    return {key: value for key, value in flatten(config.model_dump(mode="json", exclude_none=True)) if value != {}}


def _with_restart_keys_of(start: Config, wanted: Config) -> Config:
    changes: dict[str, Any] = {}
    for key, _, live in live_keys():
        if not live:
            section, name = key.split(".")
            part = changes.get(section, getattr(wanted, section))
            changes[section] = part.model_copy(update={name: getattr(getattr(start, section), name)})
    return wanted.model_copy(update=changes)
