"""The packed cache as the daemon uses it: looked at before a checkpoint is converted, written to once a model is ready.

Owns when that happens, in which thread, and what becomes of a failure: nothing here ever fails a load. What cannot be
read is discarded with a log line and the checkpoint is converted; what cannot be written is a log line.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from syshax.errors import NotFoundError, SyshaxError
from syshax.protocol import CacheAnswer, CacheEntry, CachePruneAnswer, CachePruneRequest
from syshaxd.cache import contents
from syshaxd.cache.directory import CachedEntry, CacheDirectory, Hold, NoRoomError, Room
from syshaxd.config import CacheConfig
from syshaxd.core import Core, CoreModel, CoreRuntime
from syshaxd.loader import Blueprint, LoadProgress
from syshaxd.manifest import PackedModel, UnusableError, check_same_files
from syshaxd.planner import Plan
from syshaxd.quantities import disk_share, human_size

log = logging.getLogger(__name__)


@dataclass
class _Writing:
    """One model on its way to the disk."""

    stop: threading.Event = field(default_factory=threading.Event)
    done: Future[None] | None = None


class PackedCache:
    """`directory` None: there is no cache. `config` is called at each use. Calls come from any thread."""

    def __init__(
        self,
        core: Core,
        runtime: CoreRuntime,
        plan: Plan,
        config: Callable[[], CacheConfig],
        directory: CacheDirectory | None,
    ) -> None:
        self._core, self._runtime, self._plan, self._config = core, runtime, plan, config
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "cache")
        self._holds: dict[str, Hold] = {}
        self._writings: dict[str, _Writing] = {}
        self.counts: Counter[str] = Counter(hit=0, miss=0, bad=0, written=0, skipped=0)
        """Of loads: found, not found, found and unusable; of models: written, not written."""

    @property
    def directory(self) -> CacheDirectory | None:
        """None: switched off."""
        return self._directory if self._config().enabled else None

    def start(self) -> None:
        """Removes what a crash left behind; in the cache's thread."""
        if self._directory is not None:
            self._thread.submit(self._clean, self._directory)

    def _clean(self, directory: CacheDirectory) -> None:
        try:
            for name in directory.clean():
                log.info("cache: %s was not complete and is removed", name)
        except OSError as error:
            log.warning("cache: %s cannot be cleaned: %s", directory.path, error.strerror)

    # ------------------------------------------------------------------ reading

    def load(
        self, blueprint: Blueprint, name: str, progress: LoadProgress, cancel: threading.Event
    ) -> CoreModel | None:
        """The model from its entry; None: convert the checkpoint. Raises what loader.load raises of the machine
        (NoMemoryError, CancelledError)."""
        directory = self.directory
        if directory is None:
            return None
        try:
            key = contents.key_for(self._core, self._plan, blueprint)
            hold = directory.hold(key)
        except (OSError, UnusableError) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("cache: not used for %s: %s", name, error, extra={"model": name})
            hold = None
        if hold is None:
            self.counts["miss"] += 1
            return None
        return self._read(directory, hold, blueprint, name, progress, cancel)

    def _read(
        self,
        directory: CacheDirectory,
        hold: Hold,
        blueprint: Blueprint,
        name: str,
        progress: LoadProgress,
        cancel: threading.Event,
    ) -> CoreModel | None:
        try:
            model = contents.read(self._core, self._runtime, self._plan, blueprint, hold, name, progress, cancel)
        except (OSError, UnusableError) as error:
            hold.close()
            progress.layers_done = 0
            self.counts["bad"] += 1
            log.warning(
                "cache: the entry of %s is discarded and the checkpoint converted: %s", name, error,
                extra={"model": name, "entry": hold.key},
            )  # fmt: skip
            self._discard(directory, hold.key)
            return None
        except BaseException:
            hold.close()
            raise
        hold.touch()
        self.counts["hit"] += 1
        self._holds[name] = hold
        return model

    @staticmethod
    def _discard(directory: CacheDirectory, key: str) -> None:
        try:
            directory.discard(key)
        except OSError as error:
            log.warning("cache: %s cannot be removed: %s", directory.path / key, error.strerror)

    # ------------------------------------------------------------------ writing

    def save(self, packed: PackedModel, model: CoreModel) -> None:
        """Writes a sealed model in the background, unless it has an entry. Returns at once."""
        directory = self.directory
        if directory is None or packed.name in self._holds:
            return
        writing = self._writings[packed.name] = _Writing()
        writing.done = self._thread.submit(self._save, directory, packed, model, writing)

    def _save(self, directory: CacheDirectory, packed: PackedModel, model: CoreModel, writing: _Writing) -> None:
        try:
            hold = self._write(directory, packed, model, writing)
        except contents.StoppedError:
            log.info("cache: writing %s was stopped", packed.name, extra={"model": packed.name})
        except (NoRoomError, OSError, SyshaxError, self._core.CoreError) as error:
            self.counts["skipped"] += 1
            log.warning("cache: %s is not written: %s", packed.name, error, extra={"model": packed.name})
        except Exception:
            self.counts["skipped"] += 1
            log.exception("cache: %s is not written", packed.name)
        else:
            self._holds[packed.name] = hold

    def _write(self, directory: CacheDirectory, packed: PackedModel, model: CoreModel, writing: _Writing) -> Hold:
        if writing.stop.is_set():
            raise contents.StoppedError
        packed = contents.file_form(packed, model.layer_bytes())
        if (hold := self._same(directory, packed)) is not None:
            return hold
        arenas = model.arenas()
        try:
            hold = contents.write(
                self._core, directory, packed, arenas, self._room(directory), lambda: not writing.stop.is_set()
            )
        finally:
            for arena in arenas:
                os.close(arena["fd"])
        self.counts["written"] += 1
        log.info(
            "cache: %s is written: %s", packed.name, human_size(packed.total_bytes),
            extra={"model": packed.name, "entry": hold.key},
        )  # fmt: skip
        return hold

    @staticmethod
    def _same(directory: CacheDirectory, packed: PackedModel) -> Hold | None:
        """An entry that holds this very checkpoint already: another daemon's, or one of before a restart."""
        try:
            hold = directory.hold(contents.key_of(packed))
        except FileNotFoundError:
            return None
        if hold is not None:
            try:
                if hold.manifest().files == packed.files:
                    hold.touch()
                    return hold
            except (OSError, UnusableError):
                pass
            hold.close()
        return None

    def _room(self, directory: CacheDirectory) -> Room:
        config, (_, size) = self._config(), directory.space()
        return Room(disk_share(config.limit, size), disk_share(config.reserve, size))

    def forget(self, name: str) -> None:
        """The model is unloaded: its writing ends, its entry may go. Waits for the chunks that are on their way."""
        writing = self._writings.pop(name, None)
        if writing is not None and writing.done is not None:
            writing.stop.set()
            if not writing.done.cancel():
                writing.done.exception()
        if (hold := self._holds.pop(name, None)) is not None:
            hold.close()

    def stop(self) -> None:
        """Ends all writing; nothing half-written stays."""
        for name in [*self._writings, *self._holds]:
            self.forget(name)
        self._thread.shutdown()

    # ---------------------------------------------------------- looking, pruning

    def answer(self, boot_id: str) -> CacheAnswer:
        directory, config = self._directory, self._config()
        if directory is None:
            return CacheAnswer(boot_id=boot_id, enabled=False)
        entries, (free, size) = directory.entries(), directory.space()
        return CacheAnswer(
            boot_id=boot_id,
            enabled=config.enabled,
            directory=str(directory.path),
            bytes=sum(entry.size for entry in entries),
            limit_bytes=disk_share(config.limit, size),
            reserve_bytes=disk_share(config.reserve, size),
            free_bytes=free,
            entries=[_message(entry) for entry in entries],
        )

    def prune(self, request: CachePruneRequest, boot_id: str) -> CachePruneAnswer:
        """Removes entries that are not in use: the named ones, all, or those that are of no use any more.

        Raises NotFoundError for a key that is not there.
        """
        directory = self._directory
        if directory is None:
            return CachePruneAnswer(boot_id=boot_id, removed=[], kept=[], bytes=0)
        entries = {entry.key: entry for entry in directory.entries()}
        if unknown := sorted(set(request.keys) - set(entries)):
            raise NotFoundError(f"the cache has no entry {unknown[0]}", "syshaxctl cache list shows their keys")
        wanted = request.keys or [key for key, entry in entries.items() if request.all or useless(entry)]
        removed = [key for key in wanted if directory.discard(key, only_unused=True)]
        directory.clean()
        over = 0 if request.keys else directory.shrink(self._room(directory))
        return CachePruneAnswer(
            boot_id=boot_id,
            removed=removed,
            kept=[key for key in wanted if key not in removed],
            bytes=over + sum(entries[key].size for key in removed),
        )


def useless(entry: CachedEntry) -> str:
    """Why no load can use an entry any more; empty: one might."""
    if entry.packed is None:
        return entry.fault
    try:
        if check_same_files(entry.packed, Path(entry.packed.path)):
            return ""
    except OSError as error:
        return f"its checkpoint: {error.strerror}"
    return "its checkpoint has changed"


def _message(entry: CachedEntry) -> CacheEntry:
    packed = entry.packed
    return CacheEntry(
        key=entry.key,
        name=packed.name if packed else "",
        path=packed.path if packed else "",
        format=packed.format if packed else "",
        fingerprint=packed.fingerprint if packed else "",
        bytes=entry.size,
        used_at=entry.used,
        in_use=entry.in_use,
        useless=useless(entry),
    )
