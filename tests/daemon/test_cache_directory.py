"""The cache's directory: what goes first and what never, crashes at every step, refusing disks, strangers' files."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cached_models import CORE, Rig, arena_bytes
from checkpoints import write_checkpoint

from syshaxd.cache import contents
from syshaxd.cache.directory import CacheDirectory, Hold, NoRoomError, Room
from syshaxd.cache.disk import Disk
from syshaxd.manifest import ArenaFacts, NodeShare, PackedModel

Rigs = Callable[..., Rig]
MIB = 1 << 20
ROOM = Room(1 << 30, 0)
KINDS = ("mkdir", "create", "copy", "write", "sync", "rename")


def packed(name: str, size: int = MIB) -> PackedModel:
    """One node's arena of two layers; every name is another checkpoint."""
    geometry = {
        "num_layers": 2,
        "num_experts": 1,
        "hidden_size": 1,
        "intermediate_size": 1,
        "top_k": 1,
        "layer_ids": [0, 1],
    }
    return PackedModel.model_validate(
        {
            "name": name, "path": "/nowhere", "configured": None, "format": "bf16", "architecture": "x",
            "geometry": geometry, "fingerprint": name * 8, "files": {}, "packing": "p/1", "layout_version": 1,
            "isa": "scalar", "kernels": {}, "huge_pages": "auto", "nodes": (NodeShare(node=-1, share=1.0),),
            "arenas": (ArenaFacts(index=0, bytes=size),),
        }
    )  # fmt: skip


def put(
    directory: CacheDirectory, model: PackedModel, room: Room = ROOM, go_on: Callable[[], bool] = lambda: True
) -> Hold:
    source = os.memfd_create("arena")
    try:
        os.write(source, model.name.encode() * (model.total_bytes // len(model.name)))
        return contents.write(CORE, directory, model, [{"index": 0, "fd": source, "bytes": 0}], room, go_on)
    finally:
        os.close(source)


@pytest.fixture
def directory(tmp_path: Path) -> CacheDirectory:
    return CacheDirectory(tmp_path / "cache")


def names(directory: CacheDirectory) -> list[str]:
    """Of the entries' models, least recently used first."""
    return [entry.packed.name if entry.packed else entry.fault for entry in directory.entries()]


def left_over(directory: CacheDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir() if path.name.startswith((".new", ".gone")))


def used(directory: CacheDirectory, name: str, seconds_ago: int) -> None:
    path = directory.path / contents.key_of(packed(name)) / "manifest"
    os.utime(path, (time.time() - seconds_ago,) * 2)


# ------------------------------------------------------------------ what goes first


def test_least_recently_used_goes_first_and_no_more_than_must(directory: CacheDirectory) -> None:
    for name in "abcd":
        put(directory, packed(name)).close()
    for name, ago in zip("cabd", (40, 30, 20, 10), strict=True):
        used(directory, name, ago)
    put(directory, packed("e"), Room(4 * MIB + 64 * 1024, 0)).close()
    assert names(directory) == ["a", "b", "d", "e"]
    used(directory, "a", 0)
    put(directory, packed("f", 2 * MIB), Room(4 * MIB + 64 * 1024, 0)).close()
    assert sorted(names(directory)) == ["a", "e", "f"] and not left_over(directory)


def test_using_an_entry_makes_it_the_last_to_go(directory: CacheDirectory) -> None:
    for name, ago in (("a", 20), ("b", 10)):
        put(directory, packed(name)).close()
        used(directory, name, ago)
    hold = directory.hold(contents.key_of(packed("a")))
    assert hold is not None
    hold.touch()
    hold.close()
    assert names(directory) == ["b", "a"]


def test_what_is_in_use_never_goes(directory: CacheDirectory) -> None:
    holds = [put(directory, packed(name)) for name in "ab"]
    with pytest.raises(NoRoomError, match=r"cache\.limit is 2\.5 MiB, of which 2 MiB are taken by entries in use"):
        put(directory, packed("c"), Room(5 * MIB // 2, 0))
    assert sorted(names(directory)) == ["a", "b"] and not left_over(directory)
    holds.pop().close()
    put(directory, packed("c"), Room(5 * MIB // 2, 0)).close()
    assert sorted(names(directory)) == ["a", "c"]
    assert directory.shrink(Room(0, 0)) == next(e.size for e in directory.entries()) and names(directory) == ["a"]
    assert not directory.discard(contents.key_of(packed("a")), only_unused=True)
    holds[0].close()
    assert directory.discard(contents.key_of(packed("a")), only_unused=True) and not names(directory)


def test_larger_than_the_limit_is_refused_without_robbing_others(directory: CacheDirectory) -> None:
    put(directory, packed("a")).close()
    with pytest.raises(NoRoomError, match=r"it has 3 MiB, cache\.limit is 2 MiB"):
        put(directory, packed("b", 3 * MIB), Room(2 * MIB, 0))
    assert names(directory) == ["a"]


class SmallDisk(Disk):
    """So much is free, less what the directory holds."""

    def __init__(self, size: int, path: Path) -> None:
        self.size, self.path = size, path

    def space(self, at: int) -> tuple[int, int]:
        return self.size - sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file()), self.size


def test_the_reserve_stays_free(tmp_path: Path) -> None:
    directory = CacheDirectory(tmp_path / "cache", SmallDisk(4 * MIB, tmp_path / "cache"))
    for name in "ab":
        put(directory, packed(name), Room(1 << 30, MIB)).close()
        used(directory, name, 10)
    put(directory, packed("c"), Room(1 << 30, MIB + MIB // 2)).close()
    assert len(names(directory)) == 2 and "c" in names(directory)
    with pytest.raises(NoRoomError, match=r"the disk has 2 MiB free, of which cache\.reserve keeps 3\.5 MiB"):
        put(directory, packed("d"), Room(1 << 30, 7 * MIB // 2))
    assert len(names(directory)) == 2, "nothing went in vain"


# ------------------------------------------------------------------- several at once


def test_two_daemons_share_a_directory(rig: Rigs, checkpoint: Path) -> None:
    one, two = rig(), rig()
    fresh = arena_bytes(one.fill(checkpoint))
    packed_two, model_two = two.convert(checkpoint)
    two.save(packed_two, model_two)
    assert two.cache.counts["written"] == 0, "the other's entry is taken"
    three = rig()
    model = three.from_cache(checkpoint)
    assert model is not None and arena_bytes(model) == fresh
    one.cache.forget("m"), three.cache.forget("m")
    assert two.directory.entries()[0].in_use, "one still has it"
    two.cache.forget("m")
    assert not two.directory.entries()[0].in_use


def test_writers_and_removers_at_once(directory: CacheDirectory) -> None:
    """Four threads with room for three entries: whatever is there at the end is whole, nothing is left over."""
    faults: list[BaseException] = []

    def work(number: int) -> None:
        mine = CacheDirectory(directory.path)
        try:
            for turn in range(6):
                name = "abcdef"[(number + turn) % 6]
                try:
                    put(mine, packed(name, 256 * 1024), Room(MIB, 0)).close()
                except NoRoomError:
                    continue
                if turn % 3 == 2:
                    mine.discard(contents.key_of(packed(name, 256 * 1024)))
                mine.clean()
        except BaseException as error:  # noqa: BLE001
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for entry in directory.entries():
        assert entry.packed is not None
        text = (directory.path / entry.key / "arena-0").read_bytes()
        assert text == entry.packed.name.encode() * entry.packed.total_bytes
    assert not left_over(directory)


def test_an_entry_that_is_replaced_while_it_is_read(directory: CacheDirectory) -> None:
    put(directory, packed("a")).close()
    reader = directory.hold(contents.key_of(packed("a")))
    assert reader is not None
    arena = reader.open("arena-0")
    put(directory, packed("a")).close()
    assert directory.discard(contents.key_of(packed("a")))
    assert os.pread(arena, 4, MIB - 4) == b"aaaa", "it reads on"
    os.close(arena)
    reader.close()


# --------------------------------------------------------------------------- crashes

CRASH = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_cache_directory import packed, put
from syshaxd.cache.directory import CacheDirectory
from syshaxd.cache.disk import Disk

class Crashing(Disk):
    left = 0
    def step(self, kind):
        self.left -= 1
        if self.left < 0:
            os._exit(9)

for left in range(100):
    child = os.fork()
    if child == 0:
        disk = Crashing()
        disk.left = left
        put(CacheDirectory(Path(sys.argv[1]) / str(left), disk), packed("a", 16384))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        print(left)
        break
"""


def test_a_crash_at_any_step_leaves_nothing_or_all(tmp_path: Path) -> None:
    code = CRASH.format(here=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    steps = int(done.stdout)
    assert done.returncode == 0 and steps >= 10, done.stderr
    complete = 0
    for left in range(steps + 1):
        directory = CacheDirectory(tmp_path / str(left))
        directory.path.mkdir(exist_ok=True)
        before = left_over(directory)
        entries = directory.entries()
        assert all(entry.packed is not None and not entry.in_use for entry in entries) and len(entries) <= 1
        for entry in entries:
            assert (directory.path / entry.key / "arena-0").read_bytes() == b"a" * 16384
        complete += len(entries)
        assert directory.clean() == before and not left_over(directory)
        assert len(directory.entries()) == len(entries)
        put(directory, packed("a", 16384)).close()
    assert 1 <= complete <= 3, "the rename is among the last steps"


def test_a_writer_at_work_is_not_cleaned_away(directory: CacheDirectory) -> None:
    cleaned: list[str] = []

    def go_on() -> bool:
        cleaned.extend(CacheDirectory(directory.path).clean())
        return True

    put(directory, packed("a"), go_on=go_on).close()
    assert not cleaned and names(directory) == ["a"]


# ------------------------------------------------------------- refusing file systems


class Refusing(Disk):
    """The call of that kind and number fails."""

    def __init__(self, kind: str, number: int, error: int) -> None:
        self.kind, self.left, self.error = kind, number, error

    def step(self, kind: str) -> None:
        self.left -= kind == self.kind
        if self.left == 0 and kind == self.kind:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_refuses_costs_no_model(
    rig: Rigs, checkpoint: Path, kind: str, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        caplog.clear()
        refused = rig(disk=Refusing(kind, number, error))
        model = refused.fill(checkpoint)
        assert arena_bytes(model), "the model serves"
        refused.cache.stop()
        if refused.cache.counts["skipped"]:
            assert f"m is not written: [Errno {error}] {os.strerror(error)}" in caplog.text
            assert not refused.directory.entries()
        assert not left_over(rig().directory) or CacheDirectory(refused.folder).clean()
        for entry in refused.directory.entries():
            refused.directory.discard(entry.key)


def test_a_cache_that_cannot_be_made_or_trusted(
    rig: Rigs, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert arena_bytes(rig(folder=tmp_path / "file" / "cache").fill(checkpoint))
    assert "m is not written: [Errno 20] Not a directory" in caplog.text
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    trusting = rig(folder=tmp_path / "open")
    trusting.fill(checkpoint)
    assert "others could change weights in it" in caplog.text and not list((tmp_path / "open").iterdir())
    assert trusting.from_cache(checkpoint) is None


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize("how", ["file size limit", *(["full"] if can_mount() else [])])
def test_the_kernel_s_own_refusal(
    rig: Rigs, checkpoint: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where this user may mount: a file system that is full. Everywhere: files that may not grow."""
    mount = tmp_path / "small"
    mount.mkdir()
    small = rig(folder=mount / "cache")
    small.disk.space = lambda at: (1 << 40, 1 << 40)  # type: ignore[method-assign]  # told wrongly: writing finds out
    description, model = small.convert(checkpoint, "bf16")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "full":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", mount], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        small.save(description, model)
        assert f"m is not written: [Errno {28 if how == 'full' else 27}]" in caplog.text
        assert not small.directory.entries() and not left_over(small.directory)
        small.cache.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if how == "full":
            subprocess.run(["umount", mount], check=True)
    assert arena_bytes(model)


# ------------------------------------------------------------------------- strangers


def test_strangers_files_are_left_alone(rig: Rigs, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    strange = ["README", ".hidden", "f" * 31, "F" * 32, ".new-x", "lost+found"]
    for name in strange:
        (folder / name).mkdir()
    (folder / ("0" * 32)).write_text("a file with an entry's name")
    (folder / ("1" * 32)).symlink_to(tmp_path)
    first = rig()
    fresh = arena_bytes(first.fill(checkpoint))
    model = rig().from_cache(checkpoint)
    assert model is not None and arena_bytes(model) == fresh
    assert len(first.directory.entries()) == 1
    first.directory.clean()
    first.directory.shrink(Room(0, 0))
    assert all((folder / name).exists() for name in [*strange, "0" * 32, "1" * 32])


def test_writing_stops_when_the_model_goes(rig: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "c", num_hidden_layers=8)
    reached, go = threading.Event(), threading.Event()

    class Slow(Disk):
        def step(self, kind: str) -> None:
            if kind == "copy":
                reached.set()
                go.wait(10)

    slow = rig(disk=Slow())
    description, model = slow.convert(tmp_path / "c")
    caplog.set_level(logging.INFO)
    slow.cache.save(description, model)
    assert reached.wait(10)
    ending = threading.Thread(target=slow.cache.forget, args=("m",))
    ending.start()
    while slow.cache._writings:
        time.sleep(0.001)
    go.set()
    ending.join(10)
    assert "writing m was stopped" in caplog.text
    assert not slow.directory.entries() and not left_over(slow.directory)
    assert slow.cache.counts["written"] == slow.cache.counts["skipped"] == 0


@pytest.fixture(autouse=True)
def no_descriptor_stays_open(tmp_path: Path) -> Iterator[None]:
    """In the cache's directory, whatever went wrong."""
    yield
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]  # noqa: PTH208
    opened = [str(link.readlink()) for link in links if link.exists()]
    assert len([path for path in opened if str(tmp_path) in path]) <= 12, opened
