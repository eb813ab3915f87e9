"""API keys: the file that holds their hashes, what each may do, and how often.

A key is 256 random bits, so a plain SHA-256 of it can be kept: there is nothing to guess. Keys are looked up by a hash
with this process's own secret and then compared in constant time, so that neither step tells a caller how near he was.

A key's requests are counted on the board, where all processes see them. Each process notes the sum once a second, and
what was counted since the note of a minute ago is the last minute's: never more than the limit in any 60 seconds. A
process that begins later gets the supervisor's notes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import tomli_w
from pydantic import Field

from syshax.errors import ConfigError
from syshaxd.frontend.board import Board, Cell
from syshaxd.frontend.config import PRIORITIES, Priority
from syshaxd.frontend.errors import ApiError, Kind
from syshaxd.settings import Settings, build, read_toml

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_WINDOW_SECONDS = 60


class KeySettings(Settings):
    """One key of the file."""

    sha256: str
    models: Annotated[list[str], Field(min_length=1)] | None = None
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    priority: Priority = "normal"


class _File(Settings):
    keys: dict[str, KeySettings]


class Window:
    """The requests of one key in the last minute."""

    def __init__(self, counter: Cell) -> None:
        self._counter = counter
        self._notes: deque[int] = deque(maxlen=_WINDOW_SECONDS + 1)
        self._tick = 0

    def note(self, now: float) -> None:
        """Once a second; seconds that were missed are caught up."""
        missed = int(now) - self._tick if self._tick else 1
        self._tick = int(now)
        for _ in range(min(missed, _WINDOW_SECONDS + 1)):
            self._notes.append(self._counter.total())

    def past(self) -> tuple[int, list[int]]:
        """For the `recall` of another process's window."""
        return self._tick, list(self._notes)

    def recall(self, tick: int, notes: list[int], now: float) -> None:
        """Goes on from another's past; what has been counted since then counts as of now."""
        missed = min(int(now) - 1 - tick, _WINDOW_SECONDS)
        self._notes.clear()
        self._notes.extend(notes + [notes[-1]] * missed)
        self._tick = max(tick, int(now) - 1)
        self.note(now)

    def admit(self, limit: int) -> int:
        """0 when one more request is within the limit (it is counted then), else seconds until one will be."""
        if not self._notes:
            self.note(monotonic())
        self._counter.add(1)
        total = self._counter.total()
        if total - self._notes[0] <= limit:
            return 0
        self._counter.add(-1)
        to_come = _WINDOW_SECONDS + 1 - len(self._notes)
        return to_come + next((at for at, note in enumerate(self._notes) if total - note <= limit), len(self._notes))


@dataclass(frozen=True, eq=False)
class Key:
    """What its holder may do. `priority`: index in `PRIORITIES`; `models` None: all."""

    name: str
    digest: bytes
    models: frozenset[str] | None
    requests_per_minute: int | None
    priority: int
    window: Window

    def admit(self) -> None:
        """Counts one request. `ApiError` 429 when that is too many in a minute."""
        if self.requests_per_minute is None or not (seconds := self.window.admit(self.requests_per_minute)):
            return
        raise ApiError(
            Kind.RATE,
            f"This key may send {self.requests_per_minute} requests a minute, and has; the next one in {seconds} s.",
            headers=(("Retry-After", str(seconds)),),
        )


class KeyRing:
    """The keys of one file. A failed `reload` keeps the keys that were valid before."""

    def __init__(self, path: Path, rows: Mapping[str, Any] | None = None) -> None:
        """Reads the file, unless another process's `rows` are given.

        `ConfigError` when it cannot be read or is not what `new_key` writes.
        """
        self._path = path
        self._board = Board()
        self._secret = secrets.token_bytes(32)
        self._rows: dict[str, KeySettings] = {}
        self._keys: dict[bytes, Key] = {}
        self._windows: dict[bytes, Window] = {}
        if rows is None:
            self.reload()
        else:
            self.take(rows)

    def __len__(self) -> int:
        return len(self._keys)

    def reload(self) -> None:
        """Reads the file again. Raises as the constructor does; the old keys then stay."""
        self._rows = _read(self._path)
        self._build()

    def rows(self) -> dict[str, Any]:
        """What the file said, made for JSON: names, hashes and limits."""
        return {name: row.model_dump() for name, row in self._rows.items()}

    def take(self, rows: Mapping[str, Any]) -> None:
        """Those of another process's ring, so that all have the same whatever the file says meanwhile."""
        self._rows = {name: KeySettings.model_validate(row) for name, row in rows.items()}
        self._build()

    def count_on(self, board: Board) -> None:
        """Counts requests there from now on. Called once, in the process's event loop."""
        self._board = board
        self._windows = {}
        self._build()
        self._tick()

    def past(self) -> dict[str, Any]:
        """The last minute, by hash, for the `recall` of another process's ring; made for JSON."""
        return {key.digest.hex(): key.window.past() for key in self._keys.values() if key.requests_per_minute}

    def recall(self, past: Mapping[str, Any]) -> None:
        """After `count_on`: rates count what came before this process too."""
        now = monotonic()
        for digest, (tick, notes) in past.items():
            if (window := self._windows.get(bytes.fromhex(digest))) is not None:
                window.recall(tick, notes, now)

    def find(self, authorization: str | None) -> Key | None:
        """The key that an Authorization header carries as a bearer token."""
        scheme, _, text = (authorization or "").partition(" ")
        digest = hashlib.sha256(text.strip().encode("utf-8", "surrogateescape")).digest()
        key = self._keys.get(self._place(digest))
        if not hmac.compare_digest(digest, key.digest if key else self._secret) or scheme.lower() != "bearer":
            return None
        return key

    def _build(self) -> None:
        found = [self._key(name, row) for name, row in self._rows.items()]
        self._keys = {self._place(key.digest): key for key in found}

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()

    def _key(self, name: str, row: KeySettings) -> Key:
        digest = bytes.fromhex(row.sha256)
        if digest not in self._windows:
            self._windows[digest] = Window(self._board.counter(f"requests of key {row.sha256}"))
            self._windows[digest].note(monotonic())
        models = None if row.models is None else frozenset(row.models)
        priority = PRIORITIES.index(row.priority)
        return Key(name, digest, models, row.requests_per_minute, priority, self._windows[digest])

    def _tick(self) -> None:
        now = monotonic()
        for key in self._keys.values():
            if key.requests_per_minute is not None:
                key.window.note(now)
        asyncio.get_running_loop().call_later(1.0 - now % 1.0, self._tick)


def new_key(name: str, **settings: Any) -> tuple[str, str]:
    """A fresh key, and the lines for the file. `ConfigError` for a name that cannot be used."""
    _check_name("", name)
    key = f"sk-syshax-{secrets.token_urlsafe(32)}"
    row = KeySettings(sha256=hashlib.sha256(key.encode()).hexdigest(), **settings)
    table = {"keys": {name: row.model_dump(exclude_none=True, exclude_defaults=True)}}
    return key, tomli_w.dumps(table)


def _read(path: Path) -> dict[str, KeySettings]:
    """The rows by name; no text of an error shows a value, which might be a key."""
    try:
        layer = read_toml(path)
    except ConfigError as error:
        raise ConfigError(f"keys_file {error.message}", _HINT) from None
    tables = layer.values.get("keys")
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigError(f"keys_file {path}: holds no key", _HINT)
    hashes: dict[str, str] = {}
    for name, table in tables.items():
        _check_name(f"keys_file {path}: ", name)
        where = f"keys_file {path}: keys.{name}"
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: is not a table", _HINT)
        digest = table.get("sha256")
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            raise ConfigError(f"{where}.sha256: is not 64 hexadecimal digits in lower case", _HINT)
        if digest in hashes:
            raise ConfigError(f"{where}: is the same key as keys.{hashes[digest]}", "one table for one key")
        hashes[digest] = name
    return build(_File, [layer])[0].keys


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}the name of a key is 1 to 64 letters, digits, - or _ (it has {len(name)} characters)", _HINT
        )


_HINT = "`syshax-api new-key NAME` makes a key and prints the lines for the file"
