"""Models that outlive the daemon: their arenas in the service manager's store of descriptors, and found there again.

Owns the names of descriptors in the store, the order in which they go there (all arenas of a complete, sealed model,
then its manifest, so that half a model is never found), and what is taken out of it again. Whether the arenas can be
used is manifest.py's and adoption.py's affair. Where there is no store everything here does nothing.

A descriptor's name is syshax-arena.INDEX.GENERATION.MODEL or syshax-manifest.GENERATION.MODEL. The generation is new
with every load, so that what a lost message left behind is never taken for a part of something else.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import re
import select
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from syshaxd.core import ArenaDict
from syshaxd.manifest import LARGEST_BYTES, PackedModel, UnusableError, from_bytes, to_bytes

log = logging.getLogger(__name__)
SECONDS = 5.0
"""How long the service manager may take to read a message."""
_ARENA = re.compile(r"syshax-arena\.(0|[1-9]\d{0,3})\.([0-9a-f]{16})\.([A-Za-z0-9][A-Za-z0-9._-]*)")
_MANIFEST = re.compile(r"syshax-manifest\.([0-9a-f]{16})\.([A-Za-z0-9][A-Za-z0-9._-]*)")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def arena_name(packed: PackedModel, index: int) -> str:
    return f"syshax-arena.{index}.{packed.generation}.{packed.name}"


def manifest_name(packed: PackedModel) -> str:
    return f"syshax-manifest.{packed.generation}.{packed.name}"


class Store:
    """The service manager's store of descriptors ($NOTIFY_SOCKET). Every call may raise OSError."""

    def __init__(self) -> None:
        path = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.exists = self._address.startswith(("/", "\0"))

    def put(self, name: str, descriptor: int) -> None:
        """Keeps a duplicate of the descriptor."""
        self._send(f"FDSTORE=1\nFDNAME={name}", descriptor)

    def remove(self, name: str) -> None:
        """Takes out all descriptors of that name; none is no error."""
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def barrier(self, seconds: float = SECONDS) -> bool:
        """Waits until the manager has done what was sent before. False: it did not in that time."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self._send("BARRIER=1", writer)
        finally:
            os.close(writer)
        poll = select.poll()
        poll.register(reader, 0)  # the manager closes its end
        try:
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(reader)

    def _send(self, text: str, descriptor: int | None = None) -> None:
        if not self.exists:
            return
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(SECONDS)
            connection.sendmsg([text.encode()], rights, 0, self._address)


class Keeper:
    """Which models are in the store. Calls come from any thread and never raise: at worst a restart has to load."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def keep(self, packed: PackedModel, arenas: Iterable[ArenaDict]) -> bool:
        """Puts a complete model into the store; the descriptors stay the caller's."""
        if not self._store.exists:
            return False
        with self._lock:
            try:
                self._put(packed, arenas)
                done = self._store.barrier()
            except OSError as error:
                log.warning("%s is not kept for a restart of the daemon: %s", packed.name, error.strerror or error)
                self._remove(packed.name)
                return False
        if not done:
            log.warning("the service manager has not said within %g s that it keeps %s", SECONDS, packed.name)
        return done

    def _put(self, packed: PackedModel, arenas: Iterable[ArenaDict]) -> None:
        names = self._names[packed.name] = [manifest_name(packed)]
        for arena in arenas:
            names.append(arena_name(packed, arena["index"]))
            self._store.put(names[-1], arena["fd"])
        descriptor = manifest_file(packed)
        try:
            self._store.put(names[0], descriptor)
        finally:
            os.close(descriptor)

    def adopted(self, found: Found, packed: PackedModel) -> None:
        """The store holds this model already; its manifest is replaced where it says something else than `packed`."""
        with self._lock:
            self._names[found.model] = found.names
            if packed == found.manifest():
                return
            self.remove(found.names[0])
            descriptor = manifest_file(packed)
            try:
                self._store.put(found.names[0], descriptor)
            except OSError as error:
                log.warning("%s is not kept for the next restart: %s", packed.name, error.strerror or error)
            finally:
                os.close(descriptor)

    def forget(self, name: str) -> None:
        """Takes a model out of the store, if it is there: its manifest first."""
        with self._lock:
            self._remove(name)

    def _remove(self, name: str) -> None:
        for descriptor_name in self._names.pop(name, []):
            self.remove(descriptor_name)

    def remove(self, descriptor_name: str) -> None:
        try:
            self._store.remove(descriptor_name)
        except OSError as error:
            log.warning("%s stays in the service manager's store: %s", descriptor_name, error.strerror or error)


def manifest_file(packed: PackedModel) -> int:
    """A sealed memfd with the manifest."""
    descriptor = os.memfd_create(f"syshax:{packed.name}:manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(to_bytes(packed))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# --------------------------------------------------------------------- finding


@dataclass
class Found:
    """What the store holds of one load of one model; owns the descriptors."""

    model: str
    generation: str
    manifests: list[int] = field(default_factory=list)
    arenas: dict[int, list[int]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """As they are in the store, the manifest's first."""
        return [f"syshax-manifest.{self.generation}.{self.model}"] + [
            f"syshax-arena.{index}.{self.generation}.{self.model}" for index in self.arenas
        ]

    def descriptors(self) -> dict[int, int]:
        """Index -> the one descriptor of that arena. Raises UnusableError for two under one name."""
        for index, descriptors in self.arenas.items():
            if len(descriptors) > 1:
                raise UnusableError(f"there are {len(descriptors)} descriptors of arena {index}")
        return {index: descriptors[0] for index, descriptors in self.arenas.items()}

    def manifest(self) -> PackedModel:
        """Raises UnusableError where it is missing, not what this program stores, or not of these arenas."""
        if not self.manifests:
            raise UnusableError("there is no manifest: the daemon ended before the model was complete")
        if len(self.manifests) > 1:
            raise UnusableError(f"there are {len(self.manifests)} manifests")
        packed = from_bytes(_read_sealed(self.manifests[0]))
        if (packed.name, packed.generation) != (self.model, self.generation):
            raise UnusableError(f"its manifest is of {packed.name}, load {packed.generation}")
        self._check_arenas(packed)
        return packed

    def _check_arenas(self, packed: PackedModel) -> None:
        held, wanted = self.descriptors(), {arena.index: arena.bytes for arena in packed.arenas}
        if missing := sorted(wanted.keys() - held.keys()):
            raise UnusableError(f"arena {missing[0]} of {len(wanted)} is missing")
        if extra := sorted(held.keys() - wanted.keys()):
            raise UnusableError(f"there is an arena {extra[0]}, its manifest has {len(wanted)}")
        for index, size in wanted.items():
            seen = os.fstat(held[index]).st_size
            if seen != size:
                raise UnusableError(f"arena {index} has {seen} bytes, its manifest says {size}")

    def close(self) -> None:
        for descriptor in (*self.manifests, *(one for some in self.arenas.values() for one in some)):
            with suppress(OSError):
                os.close(descriptor)


def _read_sealed(descriptor: int) -> bytes:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
    except OSError:
        raise UnusableError("its manifest is no sealed memory file") from None
    if seals & _SEALS != _SEALS:
        raise UnusableError(f"its manifest is not sealed (seals {seals})")
    if size > LARGEST_BYTES:
        raise UnusableError(f"its manifest has {size} bytes, at most {LARGEST_BYTES} are read")
    return os.pread(descriptor, size, 0)


def sort_handed(handed: Iterable[tuple[str, int]]) -> tuple[list[Found], list[tuple[str, int]]]:
    """What was handed over, by model and load, and what is none of ours."""
    found: dict[tuple[str, str], Found] = {}
    strangers: list[tuple[str, int]] = []
    for name, descriptor in handed:
        arena, manifest = _ARENA.fullmatch(name), _MANIFEST.fullmatch(name)
        if arena:
            index, generation, model = arena.groups()
            of = found.setdefault((model, generation), Found(model, generation))
            of.arenas.setdefault(int(index), []).append(descriptor)
        elif manifest:
            generation, model = manifest.groups()
            found.setdefault((model, generation), Found(model, generation)).manifests.append(descriptor)
        else:
            strangers.append((name, descriptor))
    return list(found.values()), strangers
