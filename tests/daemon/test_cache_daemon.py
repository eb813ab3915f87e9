"""The packed cache in running daemons: written after a load, read by the next process, listed and pruned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from conftest import Daemon, eventually
from test_real import Process

from syshax import Client
from syshax.control import Control
from syshax.errors import NotAllowedError, NotFoundError
from syshax.protocol import CacheAnswer, CachePruneAnswer, CachePruneRequest, ModelInfo
from syshaxd.control.rights import Rights

Start = Callable[..., Process]


@pytest.fixture
def begin(short_dir: Path) -> Iterator[Start]:
    """begin(config) -> a daemon process with the test's cache; one at a time."""
    running: list[Process] = []

    def make(config: str, **environment: str) -> Process:
        file = short_dir / "syshaxd.toml"
        file.write_text(config + f'\n[cache]\ndirectory = "{short_dir / "cache"}"\nreserve = 0\n')
        running.append(Process(short_dir / "run", "--config", file, SYSHAX_CACHE_ENABLED="", **environment))
        running[-1].wait_ready()
        return running[-1]

    yield make
    for process in running:
        if process.process.poll() is None:
            process.end()


def until(check: Callable[[], Any]) -> Any:
    for _ in range(1000):
        if found := check():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def cached(control: Control) -> CacheAnswer:
    return control.get("/v1/cache", CacheAnswer)


def output(runtime_dir: Path) -> np.ndarray:
    random = np.random.default_rng(3)
    x = random.standard_normal((5, 64)).astype(np.float32)
    ids = random.integers(0, 4, (5, 2)).astype(np.int32)
    with Client(runtime_dir=runtime_dir) as client, client.open("tiny") as model:
        return np.asarray(model.moe(1, x, ids, np.full((5, 2), 0.5, np.float32)))


def ready(daemon: Process) -> ModelInfo:
    def look() -> ModelInfo | None:
        info = daemon.control.get("/v1/models/tiny", ModelInfo)
        return info if info.state == "ready" else None

    return until(look)


def test_after_a_reboot_configured_models_come_from_the_cache(begin: Start, short_dir: Path, tmp_path: Path) -> None:
    """A new process, nothing in any store: the model loads by itself, and gives the same to the last bit."""
    write_checkpoint(tmp_path / "tiny")
    config = f'[models.tiny]\npath = "{tmp_path / "tiny"}"\nformat = "q8_0"\nautoload = true\n'
    first = begin(config)
    assert ready(first).origin == "checkpoint"
    expected = output(first.runtime_dir)
    entry = until(lambda: cached(first.control).entries)[0]
    assert entry.in_use and entry.name == "tiny" and entry.format == "q8_0"
    assert first.end() == 0
    second = begin(config)
    assert ready(second).origin == "cache"
    assert np.array_equal(output(second.runtime_dir), expected)
    assert second.end() == 0
    arena = short_dir / "cache" / entry.key / "arena-0"
    data = bytearray(arena.read_bytes())
    data[len(data) // 2] ^= 4
    arena.write_bytes(data)
    third = begin(config)
    assert ready(third).origin == "checkpoint"
    assert np.array_equal(output(third.runtime_dir), expected)
    assert "is discarded and the checkpoint converted" in third.log.read_text()
    until(lambda: cached(third.control).entries)


def test_a_kill_while_writing_is_cleaned_at_the_next_start(begin: Start, short_dir: Path, tmp_path: Path) -> None:
    left = short_dir / "cache" / f".new-{'0' * 32}-{'1' * 16}"
    left.mkdir(parents=True, mode=0o700)
    (left / "arena-0").write_bytes(b"half")
    daemon = begin("")
    until(lambda: "was not complete and is removed" in daemon.log.read_text())
    assert not left.exists()


async def test_list_and_prune_over_the_control_api(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syshaxd.core import compiled_core

    monkeypatch.delenv("SYSHAX_CACHE_ENABLED")
    for name in ("tiny", "other"):
        write_checkpoint(tmp_path / name, seed=len(name))
    models = "".join(f'[models.{name}]\npath = "{tmp_path / name}"\nautoload = true\n' for name in ("tiny", "other"))
    text = f'{models}[cache]\ndirectory = "{tmp_path / "cache"}"\nlimit = "1GiB"\nreserve = 0\n'
    daemon: Daemon = await start(text, core=Steady(compiled_core()))

    async def answer() -> CacheAnswer:
        return CacheAnswer.model_validate((await daemon.json("GET", "/v1/cache"))[1])

    async def two() -> bool:
        return len((await answer()).entries) == 2

    await eventually(two)
    found = await answer()
    assert found.enabled and found.limit_bytes == 1 << 30 and found.bytes == sum(e.bytes for e in found.entries) > 0
    assert all(entry.in_use and not entry.useless for entry in found.entries)

    async def prune(**fields: Any) -> CachePruneAnswer:
        return await daemon.ask(daemon.control.post, "/v1/cache/prune", CachePruneRequest(**fields), CachePruneAnswer)

    pruned = await prune(all=True)
    assert not pruned.removed and len(pruned.kept) == 2, "models are loaded"
    await daemon.json("DELETE", "/v1/models/other")
    (tmp_path / "other" / "model.safetensors").unlink()
    useless = {entry.name: entry.useless for entry in (await answer()).entries}
    assert useless == {"tiny": "", "other": "its checkpoint: No such file or directory"}
    pruned = await prune()
    assert len(pruned.removed) == 1 and not pruned.kept and pruned.bytes > 0
    (entry,) = (await answer()).entries
    assert entry.name == "tiny"
    checks = {check["name"]: check for check in (await daemon.json("GET", "/v1/doctor"))[1]["checks"]}
    assert checks["packed cache"]["ok"] and str(tmp_path / "cache") in checks["packed cache"]["message"]
    daemon.server.parts.cache.counts["skipped"] += 1
    checks = {check["name"]: check for check in (await daemon.json("GET", "/v1/doctor"))[1]["checks"]}
    assert (
        checks["packed cache"]["level"] == "warning"
        and "1 models were not written" in checks["packed cache"]["message"]
    )
    metrics = (await daemon.http("GET", "/metrics"))[2]
    assert b'syshax_cache_writes_total{result="written"} 2.0' in metrics
    assert b'syshax_cache_loads_total{result="miss"} 2.0' in metrics
    await daemon.json("DELETE", "/v1/models/tiny")
    with pytest.raises(NotFoundError, match="no entry"):
        await prune(keys=["f" * 32])
    assert (await prune(keys=[entry.key])).removed == [entry.key]
    monkeypatch.setattr(Rights, "is_administrator", lambda self, peer: False)
    with pytest.raises(NotAllowedError):
        await prune(all=True)
    assert not (await answer()).entries


class Steady:
    """The compiled core, with the fake's switches that the fixture turns at the end."""

    def __init__(self, core: Any) -> None:
        import threading

        self._core, self.gate_load = core, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


async def test_a_daemon_without_a_cache_says_so(daemon: Daemon) -> None:
    found = CacheAnswer.model_validate((await daemon.json("GET", "/v1/cache"))[1])
    assert not found.enabled and not found.entries and not found.directory
    answer = await daemon.ask(daemon.control.post, "/v1/cache/prune", CachePruneRequest(all=True), CachePruneAnswer)
    assert answer.bytes == 0
