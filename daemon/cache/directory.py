"""The cache's directory: entries, who uses them, what goes first when there is no room, what a crash left behind.

Owns names and locks, and no byte of an entry but its manifest. An entry is a directory named by a key; what is named
otherwise is never touched. Several daemons may share a directory: every change of names is made under `.lock`, and
whoever writes an entry, reads it or serves what was read holds a flock on it.

    KEY/               complete: renamed to its name when everything in it was on the disk
      manifest         manifest.py's text, with a checksum of its own; its time is when the entry was last used
      checksums        xxh64 of every chunk, 8 bytes little-endian, arena after arena
      arena-INDEX      the bytes of a node's arena
    .new-KEY-RANDOM/   being written (locked), or left by a crash (not locked)
    .gone-RANDOM/      being removed
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from syshaxd.cache.disk import Disk, lock
from syshaxd.manifest import LARGEST_BYTES, PackedModel, UnusableError, from_bytes
from syshaxd.quantities import human_size

log = logging.getLogger(__name__)
MANIFEST, CHECKSUMS = "manifest", "checksums"
_LOCK = ".lock"
_KEY = re.compile(r"[0-9a-f]{32}")
_LEFT = re.compile(r"\.(new-[0-9a-f]{32}|gone)-[0-9a-f]{16}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class NoRoomError(Exception):
    """An entry does not fit; the text has the numbers."""


@dataclass(frozen=True)
class Room:
    """What the cache may take."""

    limit: int
    """Of all entries together, bytes."""
    reserve: int
    """To be left free on the file system."""


@dataclass(frozen=True)
class CachedEntry:
    """What is to be seen of an entry without reading its arenas."""

    key: str
    size: int
    used: float
    """Seconds since the epoch."""
    in_use: bool
    packed: PackedModel | None
    fault: str
    """Why its manifest cannot be read."""


@dataclass
class _Taking:
    """What the directory takes while room is made in it."""

    entries: list[CachedEntry]
    """Least recently used first."""
    taken: int
    """Bytes of entries, and of what is being written or removed."""
    free: int
    removed: int = 0

    @classmethod
    def read(cls, at: int, disk: Disk) -> _Taking:
        names = _names(at)
        entries = [entry for name in names if _KEY.fullmatch(name) and (entry := _look(at, name))]
        others = sum(_size(at, name) for name in names if _LEFT.fullmatch(name))
        taken = others + sum(entry.size for entry in entries)
        return cls(sorted(entries, key=lambda entry: entry.used), taken, disk.space(at)[0])


@dataclass
class Hold:
    """An open entry that nobody removes; for reading, and as long as its model is loaded."""

    key: str
    descriptor: int

    def open(self, name: str) -> int:
        return os.open(name, _FILE, dir_fd=self.descriptor)

    def read(self, name: str, most: int) -> bytes:
        """A small file. Raises OSError, UnusableError where it is larger."""
        with os.fdopen(self.open(name), "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UnusableError(f"its {name} has more than {most} bytes")
        return data

    def manifest(self) -> PackedModel:
        return from_bytes(self.read(MANIFEST, LARGEST_BYTES))

    def touch(self) -> None:
        """It was used now. A directory that may only be read keeps its order."""
        with suppress(OSError):
            os.utime(MANIFEST, dir_fd=self.descriptor)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class CacheDirectory:
    """Methods raise OSError where the file system refuses."""

    def __init__(self, path: Path, disk: Disk | None = None) -> None:
        self.path, self.disk = path, disk or Disk()

    @contextmanager
    def opened(self, make: bool = False) -> Iterator[int]:
        """The directory's descriptor. PermissionError for one that others could put weights into."""
        if make:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
                said = f"belongs to uid {status.st_uid} with the mode {stat.S_IMODE(status.st_mode):04o}"
                raise PermissionError(errno.EPERM, f"{said}: others could change weights in it", str(self.path))
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self, make: bool = False) -> Iterator[int]:
        """The directory's descriptor, while no other daemon changes names in it."""
        with self.opened(make) as at:
            mutex = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
            try:
                lock(mutex, exclusive=True, wait=True)
                yield at
            finally:
                os.close(mutex)

    # ------------------------------------------------------------------ looking

    def entries(self) -> list[CachedEntry]:
        """Least recently used first; none where the directory does not exist."""
        try:
            with self.opened() as at:
                found = [entry for name in _names(at) if _KEY.fullmatch(name) and (entry := _look(at, name))]
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda entry: entry.used)

    def space(self) -> tuple[int, int]:
        """(free, size) of the file system that it lies on, or would lie on."""
        near = next(folder for folder in (self.path, *self.path.parents) if folder.is_dir())
        descriptor = os.open(near, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return self.disk.space(descriptor)
        finally:
            os.close(descriptor)

    def hold(self, key: str) -> Hold | None:
        """The entry, kept from removal until the hold is closed; None: there is none."""
        with self.opened() as at:
            try:
                descriptor = os.open(key, _DIRECTORY, dir_fd=at)
            except FileNotFoundError:
                return None
            lock(descriptor, exclusive=False, wait=True)  # exclusive ones last an instant
            if not _is_at(at, key, descriptor):
                os.close(descriptor)
                return None
            return Hold(key, descriptor)

    # ----------------------------------------------------------------- changing

    def clean(self) -> list[str]:
        """Removes what crashed writers and removers left; gives its names."""
        try:
            with self.locked() as at:
                left = [name for name in _names(at) if _LEFT.fullmatch(name) and not _in_use(at, name)]
                for name in left:
                    self.disk.remove(name, at)
        except FileNotFoundError:
            return []
        return left

    def discard(self, key: str, only_unused: bool = False) -> bool:
        """Removes an entry. Whoever reads it at the moment reads on. False: it is in use, or gone."""
        with self.locked() as at:
            if only_unused and _in_use(at, key):
                return False
            moved = self._move_away(key, at)
        if moved:
            with self.opened() as at:
                self.disk.remove(moved, at)
        return bool(moved)

    def _move_away(self, key: str, at: int) -> str:
        moved = f".gone-{secrets.token_hex(8)}"
        try:
            self.disk.rename(key, moved, at)
        except FileNotFoundError:
            return ""
        return moved

    def begin(self, key: str, size: int, room: Room) -> tuple[str, int]:
        """A new directory to write an entry into, locked: (its name, its descriptor). Makes room first.

        Raises NoRoomError.
        """
        with self.locked(make=True) as at:
            self._make_room(at, size, room)
            name = f".new-{key}-{secrets.token_hex(8)}"
            descriptor = self.disk.make_directory(name, at)
            lock(descriptor, exclusive=True)
            return name, descriptor

    def shrink(self, room: Room) -> int:
        """Removes least recently used entries until the limit holds; gives the bytes removed."""
        try:
            with self.locked() as at:
                taking = _Taking.read(at, self.disk)
                self._evict(at, taking, 0, Room(room.limit, 0))
                return taking.removed
        except FileNotFoundError:
            return 0

    def _make_room(self, at: int, size: int, room: Room) -> None:
        """Raises NoRoomError before anything went in vain."""
        if size > room.limit:
            raise NoRoomError(f"it has {human_size(size)}, cache.limit is {human_size(room.limit)}")
        taking = _Taking.read(at, self.disk)
        may_go = sum(entry.size for entry in taking.entries if not entry.in_use)
        if taking.taken - may_go + size > room.limit:
            in_use = f"{human_size(taking.taken - may_go)} are taken by entries in use"
            raise NoRoomError(f"it has {human_size(size)}, cache.limit is {human_size(room.limit)}, of which {in_use}")
        if taking.free + may_go - size < room.reserve:
            reserve = f"of which cache.reserve keeps {human_size(room.reserve)}"
            raise NoRoomError(f"it has {human_size(size)}, the disk has {human_size(taking.free)} free, {reserve}")
        self._evict(at, taking, size, room)

    def _evict(self, at: int, taking: _Taking, size: int, room: Room) -> None:
        """Removes entries, least recently used first, until so many bytes have room or none is left to go."""
        for entry in taking.entries:
            if taking.taken + size <= room.limit and taking.free - size >= room.reserve:
                break
            if not entry.in_use and (moved := self._move_away(entry.key, at)):
                self.disk.remove(moved, at)
                log.info("cache: %s went to make room", entry.key, extra={"bytes": entry.size})
                taking.removed += entry.size
                taking.taken, taking.free = taking.taken - entry.size, self.disk.space(at)[0]

    def publish(self, name: str, descriptor: int, key: str) -> Hold:
        """Gives a complete directory its key's name and goes on holding it. An older entry of that key is replaced."""
        self.disk.sync(descriptor)
        with self.locked() as at:
            moved = self._move_away(key, at)
            self.disk.rename(name, key, at)
            self.disk.sync(at)
            lock(descriptor, exclusive=False, wait=True)
            if moved:
                self.disk.remove(moved, at)
        return Hold(key, descriptor)

    def abandon(self, name: str) -> None:
        """Removes what begin() made. What cannot be removed now is left for clean()."""
        with suppress(OSError), self.locked() as at:
            self.disk.remove(name, at)


def _names(at: int) -> list[str]:
    with os.scandir(at) as found:
        return [entry.name for entry in found]


def _look(at: int, key: str) -> CachedEntry | None:
    """None: it went meanwhile, or may not be looked at."""
    try:
        descriptor = os.open(key, _DIRECTORY, dir_fd=at)
    except OSError:
        return None
    hold = Hold(key, descriptor)
    try:
        used, fault, packed = time.time(), "", None
        try:
            used = os.stat(MANIFEST, dir_fd=descriptor, follow_symlinks=False).st_mtime
            packed = hold.manifest()
        except OSError as error:
            fault = f"its manifest: {error.strerror}"
        except UnusableError as error:
            fault = str(error)
        return CachedEntry(key, _size(at, key), used, _in_use(at, key), packed, fault)
    finally:
        hold.close()


def _size(at: int, name: str) -> int:
    """Bytes of a directory's files."""
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=at)
    except OSError:
        return 0
    try:
        return sum(os.stat(file, dir_fd=descriptor, follow_symlinks=False).st_size for file in _names(descriptor))
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def _in_use(at: int, name: str) -> bool:
    """Whether somebody holds a lock on it."""
    try:
        descriptor = os.open(name, _DIRECTORY, dir_fd=at)
    except OSError:
        return False
    try:
        return not lock(descriptor, exclusive=True)
    finally:
        os.close(descriptor)


def _is_at(at: int, name: str, descriptor: int) -> bool:
    """Whether the name still is that directory."""
    try:
        status, known = os.stat(name, dir_fd=at, follow_symlinks=False), os.fstat(descriptor)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (known.st_dev, known.st_ino)
