"""What is in an entry: a model's arenas with checksums, written from sealed arenas and read into new ones.

Owns the key, the checksums' file and the order of bytes. Writing needs one chunk of memory and copies past the page
cache; reading goes straight into the arenas, by the threads of their own nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from syshax.errors import CheckpointError
from syshaxd import loader
from syshaxd.cache.directory import CHECKSUMS, MANIFEST, CacheDirectory, Hold, Room
from syshaxd.core import ArenaDict, Core, CoreModel, CoreRuntime
from syshaxd.loader import Blueprint, LoadProgress
from syshaxd.manifest import (
    ArenaFacts,
    NodeShare,
    PackedModel,
    UnusableError,
    check_usable,
    plan_nodes,
    to_bytes,
)
from syshaxd.planner import Plan

_CHUNKS_AT_ONCE = 16
"""Chunks copied between two looks at whether to go on."""
STAGE = "reading from the cache"


class StoppedError(Exception):
    """Writing was not to go on."""


def key_for(core: Core, plan: Plan, blueprint: Blueprint) -> str:
    """Of the entry that a load of this checkpoint would use. Raises UnusableError for a format without a packing."""
    packings = {row["format"]: row["packing"] for row in core.kernels()}
    if blueprint.format not in packings:
        raise UnusableError(f"there is no format {blueprint.format}")
    packing = packings[blueprint.format]
    return _key(blueprint.fingerprint, blueprint.format, packing, core.ARENA_LAYOUT_VERSION, plan_nodes(plan))


def key_of(packed: PackedModel) -> str:
    return _key(packed.fingerprint, packed.format, packed.packing, packed.layout_version, packed.nodes)


def _key(fingerprint: str, format: str, packing: str, layout: int, nodes: Sequence[NodeShare]) -> str:
    what = [fingerprint, format, packing, layout, [[node.node, node.share] for node in nodes]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def file_form(packed: PackedModel, layer_bytes: Mapping[int, int]) -> PackedModel:
    """The description of the files: without what huge pages add to an arena's size."""
    layers = packed.geometry.num_layers
    arenas = tuple(ArenaFacts(index=arena.index, bytes=layers * layer_bytes[arena.index]) for arena in packed.arenas)
    return packed.model_copy(update={"huge_pages": "auto", "arenas": arenas})


def _arena(index: int) -> str:
    return f"arena-{index}"


# --------------------------------------------------------------------- writing


def write(
    core: Core,
    directory: CacheDirectory,
    packed: PackedModel,
    arenas: Sequence[ArenaDict],
    room: Room,
    go_on: Callable[[], bool],
) -> Hold:
    """Writes an entry and gives it, held. packed: in file_form.

    Raises NoRoomError, OSError, StoppedError; then nothing stays.
    """
    disk = directory.disk
    manifest = to_bytes(packed)
    count = sum(len(_chunks(core, packed, arena)) for arena in packed.arenas)
    name, at = directory.begin(key_of(packed), packed.total_bytes + len(manifest) + 8 * count, room)
    try:
        checksums = b""
        given = {arena["index"]: arena["fd"] for arena in arenas}
        for arena in packed.arenas:
            target = disk.create(_arena(arena.index), at, arena.bytes)
            try:
                for offset, size in _chunks(core, packed, arena, _CHUNKS_AT_ONCE):
                    if not go_on():
                        raise StoppedError
                    found = disk.copy(core, given[arena.index], target, offset, size)
                    checksums += struct.pack(f"<{len(found)}Q", *found)
                disk.sync(target)
            finally:
                os.close(target)
        disk.write(CHECKSUMS, at, checksums)
        disk.write(MANIFEST, at, manifest)
        return directory.publish(name, at, key_of(packed))
    except BaseException:
        os.close(at)
        directory.abandon(name)
        raise


def _chunks(core: Core, packed: PackedModel, arena: ArenaFacts, together: int = 1) -> list[tuple[int, int]]:
    """(offset, bytes) of an arena's chunks: none spans two layers."""
    layer = arena.bytes // packed.geometry.num_layers
    step = together * core.PACKED_CHUNK_BYTES
    return [
        (begin, min(step, end - begin))
        for end in range(layer, arena.bytes + 1, layer)
        for begin in range(end - layer, end, step)
    ]


# --------------------------------------------------------------------- reading


def checked(
    core: Core, runtime: CoreRuntime, plan: Plan, blueprint: Blueprint, hold: Hold
) -> tuple[PackedModel, list[int]]:
    """The entry's manifest and checksums. Raises UnusableError, naming what is stale or damaged, or OSError."""
    packed = hold.manifest()
    if packed.fingerprint != blueprint.fingerprint or packed.geometry != blueprint.geometry:
        raise UnusableError("it was made of another checkpoint")
    if packed.files != blueprint.files:
        changed = sorted(name for name in {*packed.files, *blueprint.files} if _differs(packed, blueprint, name))
        raise UnusableError(f"the checkpoint has changed since: {', '.join(changed[:3])}")
    check_usable(core, runtime, plan, packed, "auto")
    count = sum(len(_chunks(core, packed, arena)) for arena in packed.arenas)
    text = hold.read(CHECKSUMS, 8 * count)
    if len(text) != 8 * count:
        raise UnusableError(f"its checksums have {len(text)} bytes, wanted {8 * count}")
    return packed, list(struct.unpack(f"<{count}Q", text))


def _differs(packed: PackedModel, blueprint: Blueprint, name: str) -> bool:
    return packed.files.get(name) != blueprint.files.get(name)


def read(
    core: Core,
    runtime: CoreRuntime,
    plan: Plan,
    blueprint: Blueprint,
    hold: Hold,
    name: str,
    progress: LoadProgress,
    cancel: threading.Event,
) -> CoreModel:
    """A sealed model out of an entry. Raises UnusableError, OSError, and what loader.load raises."""
    packed, checksums = checked(core, runtime, plan, blueprint, hold)
    layers = packed.geometry.num_layers
    with ExitStack() as stack:
        files: dict[int, tuple[int, list[int]]] = {}
        for arena in packed.arenas:
            count = len(_chunks(core, packed, arena))
            mine, checksums = checksums[:count], checksums[count:]
            files[arena.index] = hold.open(_arena(arena.index)), mine
            stack.callback(os.close, files[arena.index][0])
            if os.fstat(files[arena.index][0]).st_size != arena.bytes:
                raise UnusableError(f"its {_arena(arena.index)} does not have {arena.bytes} bytes")

        def fill(model: CoreModel, index: int) -> None:
            model.load_packed_layer(
                index, {node: (file, _of_layer(all, index, layers)) for node, (file, all) in files.items()}
            )

        try:
            return loader.filled(core, runtime, blueprint, name, progress, cancel, STAGE, fill)
        except CheckpointError as error:
            raise UnusableError(error.message) from None


def _of_layer(checksums: list[int], layer: int, layers: int) -> list[int]:
    each = len(checksums) // layers
    return checksums[layer * each : (layer + 1) * each]
