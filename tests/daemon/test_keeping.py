"""The store of descriptors: what goes in, in which order, what is found there again, and what damaged or foreign stores
do. The real server over a fake core, in this process; test_restart.py kills real daemons."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from checkpoints import write_checkpoint
from conftest import Daemon, eventually
from damaged_stores import DAMAGES
from fake_core import SEALS, CoreError, FakeCore
from service_manager import FdStore

from syshaxd.keeping import Keeper, Store, arena_name, manifest_name, sort_handed
from syshaxd.manifest import PackedModel, UnusableError, from_bytes
from syshaxd.systemd import Handed

NODES = [{"node": node, "memory_bytes": 1 << 34, "cores": [[node]]} for node in range(2)]


def two_nodes() -> FakeCore:
    return FakeCore({"source": "fake", "nodes": NODES})


def descriptors() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except OSError:
            continue
    return found


class Lives:
    """Daemons one after the other under one store. `start(config, core)` starts the next one."""

    def __init__(self, start: Callable[..., Any], store: FdStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self._start, self.store, self._patch, self._number = start, store, monkeypatch, 0
        monkeypatch.setenv("NOTIFY_SOCKET", str(store.address))

    async def start(self, config: str, core: FakeCore | None = None) -> Daemon:
        handed = Handed(others=self.store.handed())
        self._patch.setattr("syshaxd.server.take_handed", lambda: handed)
        self._number += 1
        daemon: Daemon = await self._start(config, core=core or two_nodes(), name=f"life{self._number}")
        return daemon

    async def after(self, daemon: Daemon, config: str, core: FakeCore | None = None) -> Daemon:
        """The next life, when this one has ended. For the fake core a stop and a crash leave the same."""
        await daemon.stop()
        return await self.start(config, core)


@pytest_asyncio.fixture
async def lives(start: Callable[..., Any], short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lives]:
    store = FdStore(short_dir)
    yield Lives(start, store, monkeypatch)
    store.close()


def configured(path: Path, format: str = "q8_0", **keys: Any) -> str:
    lines = [f'[models.tiny]\npath = "{path}"\nformat = "{format}"\nautoload = true']
    return "\n".join([*(f"{key} = {value}" for key, value in keys.items()), *lines, ""])


async def first_life(lives: Lives, path: Path) -> Daemon:
    write_checkpoint(path)
    daemon = await lives.start(configured(path))
    await daemon.until("tiny", "ready")
    return daemon


# ------------------------------------------------------------------- the good way


async def test_arenas_then_manifest_go_to_the_store(lives: Lives, tmp_path: Path) -> None:
    await first_life(lives, tmp_path)
    stored = [message["FDNAME"] for message in lives.store.messages if "FDSTORE" in message]
    assert [name.split(".")[0] for name in stored] == ["syshax-arena", "syshax-arena", "syshax-manifest"]
    assert all(name.endswith(".tiny") for name in stored) and len({name.split(".")[-2] for name in stored}) == 1
    ((name, manifest),) = lives.store.of_kind("manifest")
    packed = from_bytes(os.pread(manifest, 1 << 20, 0))
    assert manifest_name(packed) == name and packed.path == str(tmp_path)
    for index, (arena, descriptor) in enumerate(lives.store.of_kind("arena")):
        assert arena == arena_name(packed, index)
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS


async def test_a_model_is_ready_before_the_daemon_is(lives: Lives, tmp_path: Path) -> None:
    daemon = await first_life(lives, tmp_path)
    before = await daemon.until("tiny", "ready")
    again = await lives.after(daemon, configured(tmp_path))
    assert lives.store.ready.wait(5)
    (model,) = again.core.runtime.models  # type: ignore[union-attr]
    assert model.adopted and not model.layers
    info = await again.until("tiny", "ready")
    assert info["origin"] == "restart" and before["origin"] == "checkpoint"
    for same in ("fingerprint", "geometry", "architecture", "path", "format", "node_bytes", "configured"):
        assert info[same] == before[same]
    first_ready = next(i for i, m in reversed(list(enumerate(lives.store.messages))) if "READY" in m)
    assert lives.store.messages[first_ready]["STATUS"].startswith("ready: 1 models")
    connection, answer, _ = await again.attach({"model": "tiny", "max_tokens": 1, "fingerprint": before["fingerprint"]})
    assert answer["geometry"] == before["geometry"]
    connection.close()
    third = await lives.after(again, configured(tmp_path))
    assert (await third.until("tiny", "ready"))["origin"] == "restart"


async def test_weights_that_the_memory_has_spoilt_are_loaded_again(lives: Lives, tmp_path: Path) -> None:
    """They would end every daemon that reads them, and each next one would be given them."""
    daemon = await first_life(lives, tmp_path)
    await daemon.until("tiny", "ready")
    spoilt = lives.store.names()
    core = two_nodes()
    core.prefault_error = CoreError("hardware", "the machine's memory has an error")
    again = await lives.after(daemon, configured(tmp_path), core)
    await eventually(lambda: len(lives.store.names()) == 3 and not set(spoilt) & set(lives.store.names()))
    assert (await again.until("tiny", "ready"))["origin"] == "checkpoint"


async def test_unload_takes_it_out_manifest_first(lives: Lives, tmp_path: Path) -> None:
    daemon = await first_life(lives, tmp_path)
    for life in range(2):
        names = lives.store.names()
        lives.store.messages.clear()
        assert len(names) == 3 and (await daemon.json("DELETE", "/v1/models/tiny"))[0] == 200
        await eventually(lambda: not lives.store.store)
        removed = [message["FDNAME"] for message in lives.store.messages if "FDSTOREREMOVE" in message]
        assert sorted(removed) == names and removed[0].startswith("syshax-manifest")
        if life == 0:  # and again with a model that was adopted
            await daemon.json("POST", "/v1/models", {"name": "tiny"})
            await daemon.until("tiny", "ready")
            daemon = await lives.after(daemon, configured(tmp_path))


async def test_nothing_is_left_open(lives: Lives, tmp_path: Path) -> None:
    """Two arenas in the store and two in the daemon, in this process both: after any life the same."""
    daemon = await first_life(lives, tmp_path)
    counts = []
    for _ in range(4):
        daemon = await lives.after(daemon, configured(tmp_path))
        await daemon.until("tiny", "ready")
        counts.append(sum("memfd:fake" in text for text in descriptors().values()))
    for one in range(3):
        await daemon.json("POST", "/v1/models", {"name": f"x{one}", "path": str(tmp_path), "format": "q4_0"})
        await daemon.until(f"x{one}", "ready")
        await daemon.json("DELETE", f"/v1/models/x{one}")
    await eventually(lambda: len(lives.store.store) == 3)
    counts.append(sum("memfd:fake" in text for text in descriptors().values()))
    manifests = sum("manifest" in text for text in descriptors().values())
    assert counts == [4] * 5 and manifests == 1


# ---------------------------------------------------------------- damaged stores


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_a_damaged_store_is_emptied_and_the_model_loaded_anew(
    lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[FdStore], None]
) -> None:
    daemon = await first_life(lives, tmp_path)
    old = set(lives.store.names())
    await daemon.stop()
    damage(lives.store)
    again = await lives.start(configured(tmp_path))
    info = await again.until("tiny", "ready")
    assert info["origin"] == "checkpoint"
    (line,) = [
        line for line in capfd.readouterr().err.splitlines() if "the kept weights of tiny are discarded: " in line
    ]
    assert DAMAGES[damage] in line
    new = set(lives.store.names())
    assert len(new) == 3 and not new & old
    third = await lives.after(again, configured(tmp_path))
    assert (await third.until("tiny", "ready"))["origin"] == "restart"


async def test_foreign_descriptors_are_removed_and_disturb_nothing(
    lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon = await first_life(lives, tmp_path)
    await daemon.stop()
    left, right = socket.socketpair()
    names = [
        "stored",
        "",
        "syshax-arena.0.nonsense.tiny",
        "syshax-arena.01.0123456789abcdef.tiny",
        "syshax-manifest..x",
    ]
    for name in names:
        lives.store.put(name, os.memfd_create("foreign"))
    lives.store.put("a-socket", left.detach())
    lives.store.put("syshax-arena.0.0123456789abcdef.gone", os.open("/dev/null", os.O_RDONLY))
    again = await lives.start(configured(tmp_path))
    assert (await again.until("tiny", "ready"))["origin"] == "restart"
    await eventually(lambda: len(lives.store.store) == 3)
    log = capfd.readouterr().err
    assert all(f"descriptor {name!r} in the service manager's store is none of ours" in log for name in names)
    assert "the kept weights of gone are discarded" in log
    assert (await again.json("GET", "/v1/models/gone"))[0] == 404
    assert right.recv(1) == b"", "nobody holds the other end"
    right.close()


async def test_two_loads_under_one_name_leave_one(lives: Lives, tmp_path: Path) -> None:
    daemon = await first_life(lives, tmp_path)
    old = lives.store.handed()
    names = [name for name, _ in old]
    await daemon.json("DELETE", "/v1/models/tiny")
    await eventually(lambda: not lives.store.store)
    await daemon.json("POST", "/v1/models", {"name": "tiny"})
    await daemon.until("tiny", "ready")
    await daemon.stop()
    for name, descriptor in old:  # as if the messages had been lost
        lives.store.put(name, descriptor)
    again = await lives.start(configured(tmp_path))
    assert (await again.until("tiny", "ready"))["origin"] == "restart"
    await eventually(lambda: len(lives.store.store) == 3)
    assert len({name.split(".")[-2] for name in lives.store.names()}) == 1 and len(names) == 3


# ------------------------------------------------- what changed between two lives


def newer_packing(core: FakeCore) -> None:
    core.packing_version = 2


def newer_layout(core: FakeCore) -> None:
    core.ARENA_LAYOUT_VERSION = 2


@pytest.mark.parametrize("change", [newer_packing, newer_layout])
async def test_another_version_loads_anew(lives: Lives, tmp_path: Path, change: Callable[[FakeCore], None]) -> None:
    """Also a model that no configuration names: somebody had it loaded."""
    daemon = await first_life(lives, tmp_path)
    await daemon.json("POST", "/v1/models", {"name": "adhoc", "path": str(tmp_path), "format": "bf16"})
    await daemon.until("adhoc", "ready")
    core = two_nodes()
    change(core)
    again = await lives.after(daemon, configured(tmp_path), core)
    for name, format in (("tiny", "q8_0"), ("adhoc", "bf16")):
        info = await again.until(name, "ready")
        assert (info["origin"], info["format"]) == ("checkpoint", format)
    assert len(lives.store.store) == 6


@pytest.mark.parametrize(
    ("config", "state", "format"),
    [
        (lambda path: configured(path, "q4_0"), "ready", "q4_0"),
        (lambda path: configured(path).replace("autoload = true", "autoload = false"), "ready", "q8_0"),
        (lambda path: "", "gone", None),
        (lambda path: '[precision]\nallowed_formats = ["bf16"]\ndefault_format = "bf16"\n', "gone", None),
        (lambda path: configured(path / "other"), "ready", "q8_0"),
        (lambda path: "[compute]\nshares = [2.0, 1.0]\n" + configured(path), "ready", "q8_0"),
        (lambda path: "[compute]\nnodes = [1]\n" + configured(path), "ready", "q8_0"),
        (lambda path: '[memory]\nlimit = "8KiB"\n' + configured(path), "failed", "q8_0"),
    ],
    ids=["format", "autoload", "gone", "not allowed", "path", "shares", "nodes", "limit"],
)
async def test_the_configuration_of_the_new_life_counts(
    lives: Lives, tmp_path: Path, config: Callable[[Path], str], state: str, format: str | None
) -> None:
    daemon = await first_life(lives, tmp_path)
    write_checkpoint(tmp_path / "other", seed=3)
    fingerprint = (await daemon.until("tiny", "ready"))["fingerprint"]
    again = await lives.after(daemon, config(tmp_path))
    info = await again.until("tiny", state)
    kept = "autoload = false" in config(tmp_path)
    if state == "ready":
        assert info["format"] == format and info["origin"] == ("restart" if kept else "checkpoint")
        assert (info["fingerprint"] == fingerprint) == ("other" not in info["path"])
    assert len(lives.store.store) == (0 if state in ("gone", "failed") else len(info["node_bytes"]) + 1)


async def test_what_an_administrator_loaded_stays_as_it_was(lives: Lives, tmp_path: Path) -> None:
    """Under a configured name but in another format: no change of the configuration, so no reason to load anew."""
    text = configured(tmp_path).replace("autoload = true", "autoload = false")
    write_checkpoint(tmp_path)
    daemon = await lives.start(text)
    await daemon.json("POST", "/v1/models", {"name": "tiny", "format": "bf16"})
    await daemon.until("tiny", "ready")
    again = await lives.after(daemon, text)
    info = await again.until("tiny", "ready")
    assert (info["origin"], info["format"]) == ("restart", "bf16")
    third = await lives.after(again, text.replace("q8_0", "q4_0"))
    assert (await third.until("tiny", "ready"))["format"] == "q4_0"


async def test_a_checkpoint_that_changed_is_loaded_anew_a_missing_one_is_not_needed(
    lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await first_life(lives, tmp_path)
    (tmp_path / "config.json").touch()  # touched, not changed: its fingerprint is the same
    daemon = await lives.after(daemon, configured(tmp_path))
    assert (await daemon.until("tiny", "ready"))["origin"] == "restart"
    with monkeypatch.context() as patch:
        patch.setattr("syshaxd.adoption.loader.inspect", None)
        daemon = await lives.after(daemon, configured(tmp_path))
        first = await daemon.until("tiny", "ready")
    assert first["origin"] == "restart", "its files were read again, although nothing touched them since"
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    daemon = await lives.after(daemon, configured(tmp_path))
    assert (await daemon.until("tiny", "ready"))["origin"] == "restart"
    assert "tiny serves on, though its checkpoint cannot be read now" in capfd.readouterr().err
    write_checkpoint(tmp_path, seed=9)
    daemon = await lives.after(daemon, configured(tmp_path))
    changed = await daemon.until("tiny", "ready")
    assert changed["origin"] == "checkpoint" and changed["fingerprint"] != first["fingerprint"]


async def test_the_budget_counts_what_was_kept(lives: Lives, tmp_path: Path) -> None:
    daemon = await first_life(lives, tmp_path)
    size = sum((await daemon.until("tiny", "ready"))["node_bytes"].values())
    text = f'[memory]\nlimit = "{size * 3 // 2}"\n' + configured(tmp_path)
    again = await lives.after(daemon, text)
    assert (await again.until("tiny", "ready"))["origin"] == "restart"
    await again.json("POST", "/v1/models", {"name": "more", "path": str(tmp_path), "format": "q8_0"})
    assert "memory.limit is" in (await again.until("more", "failed"))["reason"]


# ----------------------------------------------------------- no store, half a store


async def test_without_a_service_manager_nothing_is_kept(start: Callable[..., Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    daemon = await start(configured(tmp_path))
    assert (await daemon.until("tiny", "ready"))["origin"] == "checkpoint"
    assert not Store().exists


async def test_a_manager_that_is_gone_costs_nothing_but_the_keeping(
    lives: Lives, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path)
    daemon = await lives.start("")
    lives.store.address.unlink()
    await daemon.json("POST", "/v1/models", {"name": "tiny", "path": str(tmp_path), "format": "q8_0"})
    await daemon.until("tiny", "ready")
    assert "tiny is not kept for a restart of the daemon: No such file or directory" in capfd.readouterr().err
    assert (await daemon.json("DELETE", "/v1/models/tiny"))[0] == 200


@pytest.mark.parametrize("after", range(3))
async def test_a_daemon_that_dies_between_two_messages_leaves_no_half_model(
    lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Every step of the way into the store: what is there is not taken for a model, and goes."""
    write_checkpoint(tmp_path)
    sent = 0
    put = Store.put

    def dying(store: Store, name: str, descriptor: int) -> None:
        nonlocal sent
        if sent < after:
            put(store, name, descriptor)
        sent += 1

    monkeypatch.setattr(Store, "put", dying)
    daemon = await lives.start(configured(tmp_path))
    await daemon.until("tiny", "ready")
    await daemon.stop()
    monkeypatch.setattr(Store, "put", put)
    assert len(lives.store.store) == after
    again = await lives.start(configured(tmp_path))
    info = await again.until("tiny", "ready")
    assert info["origin"] == "checkpoint" and len(lives.store.store) == 3


def test_names_are_told_apart() -> None:
    names = [
        "syshax-arena.0.0123456789abcdef.a.b", "syshax-arena.12.0123456789abcdef.a.b",
        "syshax-manifest.0123456789abcdef.a.b", "syshax-manifest.0123456789abcdee.a.b", "control",
    ]  # fmt: skip
    found, strangers = sort_handed((name, number) for number, name in enumerate(names))
    assert [(of.model, of.arenas, of.manifests) for of in found] == [
        ("a.b", {0: [0], 12: [1]}, [2]),
        ("a.b", {}, [3]),
    ]
    assert strangers == [("control", 4)] and found[0].names == [names[2], *names[:2]]
    with pytest.raises(UnusableError, match="no manifest"):
        from_found = found[0]
        from_found.manifests.clear()
        from_found.manifest()


def test_names_fit_the_service_managers_limits(packed_fields: dict[str, Any]) -> None:
    """systemd takes 255 characters of printable ASCII without colons."""
    longest = PackedModel(**packed_fields | {"name": "a" * 128})
    for name in (arena_name(longest, 9999), manifest_name(longest)):
        assert len(name) <= 255 and ":" not in name and name.isascii() and name.isprintable()


@pytest.fixture
def packed_fields() -> dict[str, Any]:
    from syshax.protocol import Geometry

    geometry = Geometry(num_layers=1, num_experts=1, hidden_size=1, intermediate_size=1, top_k=1, layer_ids=[0])
    return {
        "name": "m", "path": "/m", "configured": None, "format": "bf16", "architecture": "x", "geometry": geometry,
        "fingerprint": "0", "files": {}, "packing": "p/1", "layout_version": 1, "isa": "", "kernels": {},
        "huge_pages": "auto", "nodes": (), "arenas": (),
    }  # fmt: skip


async def test_a_manager_that_does_not_answer_is_not_waited_for_long(
    short_dir: Path, packed_fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier's end is held, as by a manager that hangs: the load goes on after the time set."""
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    silent.bind(str(short_dir / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(short_dir / "notify"))
    monkeypatch.setattr("syshaxd.keeping.SECONDS", 0.1)
    store = Store()
    assert not store.barrier(0.1)
    kept = await asyncio.to_thread(Keeper(store).keep, PackedModel(**packed_fields), [])
    silent.close()
    assert kept is False
