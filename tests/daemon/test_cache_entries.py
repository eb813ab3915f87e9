"""The packed cache's entries: the same bytes as a fresh conversion, and never others, whatever became of the files."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cached_models import CORE, Rig, arena_bytes
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import CancelledError
from syshaxd import _core
from syshaxd.cache import contents
from syshaxd.cache.packed_cache import PackedCache
from syshaxd.loader import LoadProgress

Rigs = Callable[..., Rig]
MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip


def xxh64(data: bytes, seed: int = 0) -> int:
    """The specification, step by step."""

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & MASK

    def rounded(lane: int, word: int) -> int:
        return rotate((lane + word * P2) & MASK, 31) * P1 & MASK

    at = 0
    if len(data) >= 32:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        while len(data) - at >= 32:
            for lane in range(4):
                lanes[lane] = rounded(lanes[lane], int.from_bytes(data[at : at + 8], "little"))
                at += 8
        value = sum(rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            value = ((value ^ rounded(0, lane)) * P1 + P4) & MASK
    else:
        value = (seed + P5) & MASK
    value = (value + len(data)) & MASK
    for size, mix in ((8, 0), (4, 1), (1, 2)):
        while len(data) - at >= size:
            word = int.from_bytes(data[at : at + size], "little")
            at += size
            if mix == 0:
                value = (rotate(value ^ rounded(0, word), 27) * P1 + P4) & MASK
            elif mix == 1:
                value = (rotate(value ^ word * P1 & MASK, 23) * P2 + P3) & MASK
            else:
                value = rotate(value ^ word * P5 & MASK, 11) * P1 & MASK
    for shift, prime in ((33, P2), (29, P3)):
        value = (value ^ value >> shift) * prime & MASK
    return value ^ value >> 32


def test_the_checksum_s_known_answers() -> None:
    """The specification's own."""
    assert _core.xxh64(b"") == 0xEF46DB3751D8E999
    assert _core.xxh64(b"a") == 0xD24EC4F1A98C6E5B
    assert _core.xxh64(b"abc") == 0x44BC2CF5AD770999
    assert _core.xxh64(b"", 0x9E3779B1) == 0xAC75FDA2929B17EF


@given(st.binary(max_size=200), st.integers(0, MASK))
def test_the_checksum_is_the_specification_s(data: bytes, seed: int) -> None:
    assert _core.xxh64(data, seed) == xxh64(data, seed)


@pytest.mark.parametrize("shares", [(1.0,), (3.0, 1.0), (1.0, 0.0001)])
@pytest.mark.parametrize("format", _core.formats())
def test_a_round_trip_gives_what_converting_gives(
    rig: Rigs, checkpoint: Path, format: str, shares: tuple[float, ...]
) -> None:
    first = rig(shares=shares)
    fresh = arena_bytes(first.fill(checkpoint, format))
    second = rig(shares=shares)
    model = second.from_cache(checkpoint, format)
    assert model is not None and second.cache.counts["hit"] == 1
    assert arena_bytes(model) == fresh
    assert arena_bytes(second.convert(checkpoint, format)[1]) == fresh


@pytest.mark.parametrize("chunk", [4096, 12288, 1 << 20])
def test_any_size_of_chunk(rig: Rigs, checkpoint: Path, chunk: int) -> None:
    """Layers of several chunks, the last one shorter, and copies that begin anywhere."""
    write_checkpoint(checkpoint, num_hidden_layers=3, moe_intermediate_size=1024, hidden_size=1024, num_experts=3)
    assert CORE.PACKED_CHUNK_BYTES == 4 << 20
    first = rig()
    fresh = arena_bytes(first.fill(checkpoint, "bf16"))
    assert len(fresh[0]) == 3 * 3 * 3 * 2 << 20, "a layer is four and a half chunks"
    source, target = os.memfd_create("a"), os.memfd_create("b")
    os.write(source, fresh[0])
    found = _core.copy_packed(source, target, chunk, len(fresh[0]) - chunk)
    cut = [fresh[0][at : at + (4 << 20)] for at in range(chunk, len(fresh[0]), 4 << 20)]
    assert found == [_core.xxh64(part) for part in cut]
    assert os.pread(target, 1 << 30, 0)[chunk:] == fresh[0][chunk:]
    os.close(source), os.close(target)
    model = rig().from_cache(checkpoint, "bf16")
    assert model is not None and arena_bytes(model) == fresh


def broken(how: str, entry: Path, other: Path) -> None:
    """Does something to an entry's files."""
    arena, checksums, manifest = entry / "arena-0", entry / "checksums", entry / "manifest"
    if how == "arena cut":
        os.truncate(arena, arena.stat().st_size - 1)
    elif how == "arena longer":
        os.truncate(arena, arena.stat().st_size + 4096)
    elif how == "arena gone":
        arena.unlink()
    elif how == "arena zeroed":
        size = arena.stat().st_size
        os.truncate(arena, 0)
        os.truncate(arena, size)
    elif how == "arena is a link":
        arena.rename(other)
        arena.symlink_to(other)
    elif how == "arena is a directory":
        arena.unlink()
        arena.mkdir()
    elif how == "checksums cut":
        os.truncate(checksums, 8)
    elif how == "checksums longer":
        os.truncate(checksums, checksums.stat().st_size + 8)
    elif how == "checksums gone":
        checksums.unlink()
    elif how == "manifest empty":
        os.truncate(manifest, 0)
    elif how == "manifest gone":
        manifest.unlink()
    elif how == "manifest of another version":
        manifest.write_bytes(manifest.read_bytes().replace(b"syshax-packed 1", b"syshax-packed 9", 1))
    elif how == "manifest is something else":
        manifest.write_bytes(os.urandom(1000))
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    [
        "arena cut", "arena longer", "arena gone", "arena zeroed", "arena is a link", "arena is a directory",
        "checksums cut", "checksums longer", "checksums gone", "manifest empty", "manifest gone",
        "manifest of another version", "manifest is something else",
    ],
)  # fmt: skip
def test_damage_is_seen_discarded_and_converted(
    rig: Rigs, checkpoint: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = rig()
    fresh = arena_bytes(first.fill(checkpoint))
    first.cache.stop()
    broken(how, first.entry(), tmp_path / "elsewhere")
    second = rig()
    assert second.from_cache(checkpoint) is None and second.cache.counts["bad"] == 1
    assert "is discarded and the checkpoint converted" in caplog.text
    assert not second.directory.entries()
    assert arena_bytes(second.fill(checkpoint)) == fresh
    model = rig().from_cache(checkpoint)
    assert model is not None and arena_bytes(model) == fresh


def test_every_flipped_bit_is_seen(rig: Rigs, checkpoint: Path) -> None:
    """A hundred of them, anywhere in any file."""
    first = rig()
    fresh = arena_bytes(first.fill(checkpoint, "q4_0"))
    first.cache.stop()
    kept, chosen = first.folder.with_name("kept"), random.Random(7)
    shutil.copytree(first.entry(), kept)
    reader = rig()
    for round in range(100):
        name = ("manifest", "checksums", "arena-0")[round % 3]
        path = first.folder / first.directory.entries()[0].key / name
        data = bytearray(path.read_bytes())
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        path.write_bytes(data)
        assert reader.from_cache(checkpoint, "q4_0") is None, f"round {round}: {name}"
        shutil.copytree(kept, first.folder / contents.key_for(CORE, first.plan, first.blueprint(checkpoint, "q4_0")))
    model = reader.from_cache(checkpoint, "q4_0")
    assert model is not None and arena_bytes(model) == fresh
    assert reader.cache.counts == {"hit": 1, "miss": 0, "bad": 100, "written": 0, "skipped": 0}


def test_a_changed_checkpoint_is_stale_and_another_plan_or_format_another_entry(
    rig: Rigs, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig().fill(checkpoint, "q8_0")
    assert rig().from_cache(checkpoint, "q4_0") is None
    assert rig(shares=(1.0, 1.0)).from_cache(checkpoint, "q8_0") is None
    assert "discarded" not in caplog.text and len(rig().directory.entries()) == 1
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    assert rig().from_cache(checkpoint, "q8_0") is None
    assert "the checkpoint has changed since: model.safetensors" in caplog.text
    assert not rig().directory.entries()


def test_the_same_name_with_other_weights_is_never_taken(rig: Rigs, checkpoint: Path) -> None:
    rig().fill(checkpoint)
    write_checkpoint(checkpoint, seed=1)
    last = rig()
    assert last.from_cache(checkpoint) is None
    assert arena_bytes(last.fill(checkpoint)) == arena_bytes(rig().from_cache(checkpoint))


def test_pages_of_any_kind(rig: Rigs, checkpoint: Path) -> None:
    fresh = arena_bytes(rig().fill(checkpoint))
    model = rig(huge_pages="auto").from_cache(checkpoint)
    assert model is not None and arena_bytes(model) == fresh


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_writing_takes_a_chunk_of_memory_not_a_model(rig: Rigs, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, num_hidden_layers=2, moe_intermediate_size=1024, hidden_size=2048, num_experts=8)
    writer, peak, done = rig(), [0], threading.Event()
    description, model = writer.convert(checkpoint, "bf16")
    assert model.pool_bytes() == 192 << 20
    gc.collect()
    before = anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    writer.save(description, model)
    done.set()
    watcher.join()
    assert writer.cache.counts["written"] == 1 and 0 < peak[0] < before + (32 << 20)


def test_reading_is_cancelled_between_layers_and_leaves_the_entry(rig: Rigs, checkpoint: Path) -> None:
    rig().fill(checkpoint)
    second, cancel, progress = rig(), threading.Event(), LoadProgress()
    cancel.set()
    with pytest.raises(CancelledError):
        second.cache.load(second.blueprint(checkpoint, "q8_0"), "m", progress, cancel)
    assert progress.stage == "reading from the cache"
    assert second.from_cache(checkpoint) is not None


def test_switched_off_it_neither_reads_nor_writes(rig: Rigs, checkpoint: Path) -> None:
    off = rig()
    off.config = off.config.model_copy(update={"enabled": False})
    off.fill(checkpoint)
    assert not off.folder.exists()
    rig().fill(checkpoint)
    assert off.from_cache(checkpoint) is None and off.cache.counts["miss"] == 0
    without = PackedCache(CORE, off.runtime, off.plan, lambda: off.config, None)
    without.start()
    assert (
        without.answer("b").directory == ""
        and without.load(off.blueprint(checkpoint, "q8_0"), "m", LoadProgress(), threading.Event()) is None
    )
    without.stop()
