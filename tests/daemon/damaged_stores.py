"""What may be wrong with a store of descriptors, one function each, and what the daemon says of it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from fake_core import MEMFD_FLAGS, SEALS
from service_manager import FdStore

from syshaxd.keeping import manifest_file
from syshaxd.manifest import from_bytes


def sealed_copy(text: bytes, seals: int = SEALS | fcntl.F_SEAL_WRITE) -> int:
    descriptor = os.memfd_create("copy", MEMFD_FLAGS)
    os.write(descriptor, text)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def replace(store: FdStore, name: str, descriptor: int) -> None:
    store.remove(name)
    store.put(name, descriptor)


def no_manifest(store: FdStore) -> None:
    store.remove(store.of_kind("manifest")[0][0])


def no_arena(store: FdStore) -> None:
    store.remove(store.of_kind("arena")[0][0])


def one_arena_more(store: FdStore) -> None:
    name, descriptor = store.of_kind("arena")[0]
    store.put(name.replace("arena.0", "arena.5"), os.dup(descriptor))


def arena_twice(store: FdStore) -> None:
    name, descriptor = store.of_kind("arena")[0]
    store.put(name, os.dup(descriptor))


def manifest_twice(store: FdStore) -> None:
    name, descriptor = store.of_kind("manifest")[0]
    store.put(name, os.dup(descriptor))


def unsealed_arena(store: FdStore) -> None:
    name, descriptor = store.of_kind("arena")[0]
    size = os.fstat(descriptor).st_size
    replace(store, name, open_memory := os.memfd_create("open", MEMFD_FLAGS))
    os.truncate(open_memory, size)


def short_arena(store: FdStore) -> None:
    replace(store, store.of_kind("arena")[1][0], sealed_copy(bytes(4096)))


def arena_is_a_pipe(store: FdStore) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    replace(store, store.of_kind("arena")[1][0], reader)


def damaged_manifest(store: FdStore) -> None:
    name, descriptor = store.of_kind("manifest")[0]
    text = bytearray(os.pread(descriptor, 1 << 20, 0))
    text[len(text) // 2] ^= 1
    replace(store, name, sealed_copy(bytes(text)))


def empty_manifest(store: FdStore) -> None:
    replace(store, store.of_kind("manifest")[0][0], sealed_copy(b""))


def unsealed_manifest(store: FdStore) -> None:
    name, descriptor = store.of_kind("manifest")[0]
    replace(store, name, sealed_copy(os.pread(descriptor, 1 << 20, 0), fcntl.F_SEAL_SHRINK))


def manifest_is_null(store: FdStore) -> None:
    replace(store, store.of_kind("manifest")[0][0], os.open("/dev/null", os.O_RDONLY))


def manifest_of_another_name(store: FdStore) -> None:
    name, descriptor = store.of_kind("manifest")[0]
    packed = from_bytes(os.pread(descriptor, 1 << 20, 0))
    replace(store, name, manifest_file(packed.model_copy(update={"name": "other"})))


DAMAGES: dict[Callable[[FdStore], None], str] = {
    no_manifest: "there is no manifest: the daemon ended before the model was complete",
    no_arena: "arena 0 of 2 is missing",
    one_arena_more: "there is an arena 5, its manifest has 2",
    arena_twice: "there are 2 descriptors of arena 0",
    manifest_twice: "there are 2 manifests",
    unsealed_arena: "is no sealed arena",
    short_arena: "arena 1 has 4096 bytes, its manifest says",
    arena_is_a_pipe: "arena 1 has 0 bytes, its manifest says",
    damaged_manifest: "the manifest's checksum does not match",
    empty_manifest: "the manifest does not begin as one",
    unsealed_manifest: "its manifest is not sealed",
    manifest_is_null: "its manifest is no sealed memory file",
    manifest_of_another_name: "its manifest is of other",
}
