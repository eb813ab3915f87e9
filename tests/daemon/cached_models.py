"""Real models and what is needed to send them through the cache: a core, a plan, a checkpoint, a loaded model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from checkpoints import write_checkpoint

from syshaxd import _core, loader
from syshaxd.cache.directory import CacheDirectory
from syshaxd.cache.disk import Disk
from syshaxd.cache.packed_cache import PackedCache
from syshaxd.config import CacheConfig, Config
from syshaxd.core import Core, CoreModel
from syshaxd.loader import LoadProgress
from syshaxd.manifest import PackedModel, describe
from syshaxd.planner import Plan, PlannedNode

CORE = cast(Core, _core)


def plan_of(shares: tuple[float, ...] = (1.0,)) -> Plan:
    """Unbound nodes on this machine's CPUs."""
    cpus = tuple(sorted(os.sched_getaffinity(0)))[:1]
    nodes = tuple(PlannedNode(index, cpus, share, 1 << 40, bind=False) for index, share in enumerate(shares))
    return Plan(nodes, 0, cpus, None)


@dataclass
class Rig:
    """One daemon's side of a cache directory. `config` may be replaced."""

    folder: Path
    shares: tuple[float, ...] = (1.0,)
    disk: Disk = field(default_factory=Disk)
    config: CacheConfig = field(default_factory=lambda: CacheConfig(limit=1 << 30, reserve=0))
    huge_pages: str = "off"

    def __post_init__(self) -> None:
        self.plan = plan_of(self.shares)
        plans = [{"node": -1, "cpus": [], "threads": 1, "share": share} for share in self.shares]
        self.runtime: Any = _core.Runtime(plans, "", 0, self.huge_pages, 64)
        self.directory = CacheDirectory(self.folder, self.disk)
        self.cache = PackedCache(CORE, self.runtime, self.plan, lambda: self.config, self.directory)

    def blueprint(self, checkpoint: Path, format: str) -> loader.Blueprint:
        return loader.sized(CORE, self.runtime, self.plan, loader.inspect(checkpoint, format))

    def convert(self, checkpoint: Path, format: str = "q8_0", name: str = "m") -> tuple[PackedModel, CoreModel]:
        """Freshly, whatever the cache holds."""
        blueprint = self.blueprint(checkpoint, format)
        model = loader.load(CORE, self.runtime, blueprint, name, LoadProgress(), threading.Event())
        return describe(CORE, self.plan, model, blueprint, name, Config(), "scalar"), model

    def from_cache(self, checkpoint: Path, format: str = "q8_0", name: str = "m") -> CoreModel | None:
        return self.cache.load(self.blueprint(checkpoint, format), name, LoadProgress(), threading.Event())

    def save(self, packed: PackedModel, model: CoreModel) -> None:
        """Until it is written, or is not."""
        self.cache.save(packed, model)
        writing = self.cache._writings.get(packed.name)
        if writing is not None and writing.done is not None:
            writing.done.result(60)

    def fill(self, checkpoint: Path, format: str = "q8_0", name: str = "m") -> CoreModel:
        """Converts and writes; gives the model."""
        packed, model = self.convert(checkpoint, format, name)
        self.save(packed, model)
        return model

    def entry(self) -> Path:
        """The only one."""
        (found,) = (path for path in self.folder.iterdir() if not path.name.startswith("."))
        return found


def arena_bytes(model: CoreModel) -> list[bytes]:
    """What lies in each arena."""
    found = []
    for arena in model.arenas():
        found.append(os.pread(arena["fd"], arena["bytes"], 0))
        os.close(arena["fd"])
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """rig(shares=..., disk=...) -> Rig on the test's one cache directory."""
    made: list[Rig] = []

    def make(**changes: Any) -> Rig:
        made.append(Rig(**{"folder": tmp_path / "cache", **changes}))
        return made[-1]

    yield make
    for each in made:
        each.cache.stop()
