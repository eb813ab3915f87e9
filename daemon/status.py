"""What the daemon says of itself: status, nodes, topology, kernels, and what is not as good as it could be.

Owns the making of these answers from the parts' own numbers. It changes nothing and keeps only the samples from which
busy fractions come.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from syshax.protocol import (
    Dtype,
    KernelInfo,
    KernelsAnswer,
    ModelState,
    NodeInfo,
    OperatorLibrary,
    StatusAnswer,
    TopologyAnswer,
)
from syshaxd.cache.packed_cache import PackedCache
from syshaxd.core import Core, CoreRuntime
from syshaxd.live_config import LiveConfig
from syshaxd.planner import Plan
from syshaxd.quantities import format_cpus
from syshaxd.registry import Registry
from syshaxd.sessions import Sessions

SAMPLE_SECONDS = 2.0
_SAMPLES = 4
STALLED_SECONDS = 10.0
"""A data plane whose last turn is longer ago is reported as stalled."""

State = Literal["starting", "ready", "degraded", "draining"]


def version() -> str:
    try:
        return importlib.metadata.version("syshax")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


@dataclass
class Parts:
    """What a daemon is made of, passed by reference to whatever reports on it."""

    core: Core
    runtime: CoreRuntime
    plan: Plan
    registry: Registry
    sessions: Sessions
    config: LiveConfig
    boot_id: bytes
    isa_cap: str
    topology: dict[str, Any]
    group_found: bool
    cache: PackedCache
    libraries: list[OperatorLibrary] = field(default_factory=list)
    view_trouble: str = ""
    """Why there is no view socket."""
    started_at: float = field(default_factory=time.monotonic)
    state: State = "starting"

    @property
    def boot(self) -> str:
        return self.boot_id.hex()


class Reporter:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._samples: deque[tuple[float, list[int]]] = deque(maxlen=_SAMPLES)
        self._version = version()
        self._kernels = self._kernel_table()

    def sample(self) -> None:
        """Called every SAMPLE_SECONDS."""
        self._samples.append((time.monotonic(), list(self._parts.runtime.stats()["busy_ns"])))

    def status(self) -> StatusAnswer:
        parts = self._parts
        stats, warnings = parts.runtime.stats(), self.warnings()
        troubles = self.troubles(stats)
        state: State = "degraded" if parts.state == "ready" and troubles else parts.state
        return StatusAnswer(
            version=self._version,
            boot_id=parts.boot,
            pid=os.getpid(),
            state=state,
            reason="; ".join(troubles),
            uptime_seconds=time.monotonic() - parts.started_at,
            cpu=parts.core.cpu_name(),
            isa=parts.core.isa_effective(parts.isa_cap),
            isa_best=parts.core.isa_effective(""),
            nodes=self.nodes(),
            models=parts.registry.infos(),
            sessions=len(parts.sessions),
            requests_completed=stats["requests_completed"],
            requests_failed=stats["requests_failed"],
            tokens=stats["tokens"],
            compute_seconds=stats["compute_ns"] / 1e9,
            pool_bytes=parts.registry.pool_bytes(),
            memory_limit_bytes=parts.config.current().memory.limit,
            accelerator_mode=parts.config.current().accelerator.mode,
            warnings=warnings,
        )

    def troubles(self, stats: dict[str, Any]) -> list[str]:
        """What makes the daemon degraded: it serves, but not all that it should."""
        config = self._parts.config.current()
        found = [
            f"model {entry.name} failed: {entry.reason}"
            for entry in self._parts.registry.entries()
            if entry.state is ModelState.FAILED and entry.name in config.models and config.models[entry.name].autoload
        ]
        age = stats["heartbeat_age_ns"] / 1e9
        if age > STALLED_SECONDS:
            found.append(f"the data plane has not turned for {age:.0f} s")
        return found

    def warnings(self) -> list[str]:
        """What is slower or smaller than this machine could have it."""
        parts = self._parts
        found = list(parts.plan.notes)
        if gone := parts.plan.gone_cpus():
            found.append(
                f"CPUs {format_cpus(gone)} are offline or closed to this daemon since it started: their threads crowd "
                "the others; `systemctl restart syshaxd` plans anew"
            )
        effective, best = parts.core.isa_effective(parts.isa_cap), parts.core.isa_effective("")
        if effective != best:
            found.append(f"kernels are capped at {effective}; this CPU has {best} (compute.isa or SYSHAX_ISA)")
        for name, format, dtype, chosen, better in self.kernels_not_best():
            found.append(f"{name} ({format}) computes {dtype} with {chosen}, although {better} would be better")
        found += [
            f"operator library {library.path} is refused: {library.reason}"
            for library in parts.libraries
            if not library.loaded
        ]
        stale = [str(session.session_id) for session in parts.sessions if session.stale]
        if stale:
            found.append(f"sessions of stopped processes: {', '.join(stale)}")
        if parts.view_trouble:
            found.append(f"there is no view socket, so that syshax-api cannot see this daemon: {parts.view_trouble}")
        if restart := parts.config.needs_restart():
            found.append(f"configured, but in force only after a restart: {', '.join(restart)}")
        return found

    def kernels_not_best(self) -> list[tuple[str, str, str, str, str]]:
        """(model, format, dtype, chosen kernel, best kernel of this CPU) where the two differ."""
        found = []
        for entry in self._parts.registry.entries():
            for dtype, kernel in (entry.model.kernels() if entry.model else {}).items():
                best = self._parts.core.select_kernel(entry.format, dtype, "")
                if kernel != best:
                    found.append((entry.name, entry.format, dtype, kernel, best))
        return found

    def busy_fractions(self) -> list[float]:
        """Of the last seconds, the part that each node's threads computed."""
        nodes = self._parts.plan.nodes
        if len(self._samples) < 2:
            return [0.0] * len(nodes)
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        spans = [len(node.cpus) * (end - begin) * 1e9 for node in nodes]
        return [min(1.0, (late - early) / span) for early, late, span in zip(first, last, spans, strict=True)]

    def nodes(self) -> list[NodeInfo]:
        parts = self._parts
        held: dict[int, int] = {}
        huge: dict[int, int] = {}
        for entry in parts.registry.entries():
            if entry.model is not None:
                for index, value in entry.model.node_bytes().items():
                    held[index] = held.get(index, 0) + value
                for index, value in entry.model.huge_bytes().items():
                    huge[index] = huge.get(index, 0) + value
        return [
            NodeInfo(
                node=node.node,
                cpus=list(node.cpus),
                threads=len(node.cpus),
                share=node.share,
                memory_bytes=node.memory_bytes,
                free_bytes=parts.core.node_free_bytes(node.node if node.bind else -1),
                pool_bytes=held.get(index, 0),
                huge_bytes=huge.get(index, 0),
                busy_fraction=busy,
            )
            for index, (node, busy) in enumerate(zip(parts.plan.nodes, self.busy_fractions(), strict=True))
        ]

    def topology(self) -> TopologyAnswer:
        parts = self._parts
        return TopologyAnswer(
            boot_id=parts.boot,
            source=str(parts.topology["source"]),
            nodes=parts.topology["nodes"],
            allowed_cpus=list(parts.plan.allowed_cpus),
            quota_cpus=parts.plan.quota_cpus,
            plan=self.nodes(),
        )

    def kernels(self) -> KernelsAnswer:
        core = self._parts.core
        return KernelsAnswer(
            boot_id=self._parts.boot,
            cpu_features=core.cpu_features(),
            isa=core.isa_effective(self._parts.isa_cap),
            kernels=self._kernels,
            libraries=self._parts.libraries,
        )

    def _kernel_table(self) -> list[KernelInfo]:
        core, cap = self._parts.core, self._parts.isa_cap
        chosen: dict[str, list[Dtype]] = {}
        for format, dtype in itertools.product(core.formats(), Dtype):
            with contextlib.suppress(core.CoreError):  # a library's format may have no kernel for this CPU
                chosen.setdefault(core.select_kernel(format, dtype.value, cap), []).append(dtype)
        return [
            KernelInfo(
                name=row["name"],
                format=row["format"],
                activation=row["activation"],
                isa=row["isa"],
                packing=row["packing"],
                usable=row["usable"],
                chosen_for=chosen.get(row["name"], []),
                vendor=row["vendor"] or "syshax",
            )
            for row in core.kernels(cap)
        ]
