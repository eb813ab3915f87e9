"""A core without C++: the same interface, small and obvious, computing in float32 with numpy.

For API tests: formats are only bytes counted, kernels only names, rings are mapped but not served. It can be told to
misbehave (fail, stall, take long), which the real one cannot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from typing import Any

import numpy as np

BLOCKS = {"bf16": (1, 2), "fp16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
ISAS = ["scalar", "avx2", "avx512"]
PAGE = 4096
CLOSING_OFFSET = 276
F_SEAL_FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | F_SEAL_FUTURE_WRITE
MEMFD_FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING


class CoreError(Exception):
    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


def widened(array: Any, dtype: str) -> np.ndarray:
    values = np.asarray(array)
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class FakeFile(bytes):
    """The file's bytes, read whole; cut short when the test says so."""

    core: FakeCore

    def cut_short(self) -> bool:
        return self.core.files_cut_short

    def prefetch(self, offset: int, bytes: int) -> None:
        pass

    def release(self, offset: int, bytes: int) -> None:
        pass


class FakeModel:
    def __init__(self, name: str, geometry: dict[str, int], format: str, node_bytes: list[int], core: FakeCore) -> None:
        self.name, self.format = name, format
        self._geometry, self._bytes, self._core = geometry, node_bytes, core
        self.layers: dict[int, tuple[list[np.ndarray], ...]] = {}
        self.sealed = self.dropped = self.adopted = False
        self.packing = core.packing(format)
        self.arena_fds: dict[int, int] = {}

    def geometry(self) -> dict[str, int]:
        return self._geometry

    def pool_bytes(self) -> int:
        return sum(self.node_bytes().values())

    def node_bytes(self) -> dict[int, int]:
        return {index: -(-size // PAGE) * PAGE for index, size in enumerate(self._bytes)}

    def huge_bytes(self) -> dict[int, int]:
        return dict.fromkeys(range(len(self._bytes)), 0)

    def kernels(self) -> dict[str, str]:
        return {dtype: self._core.select_kernel(self.format, dtype, self._core.runtime_cap) for dtype in DTYPES}

    def load_layer(self, layer: int, gate: list[Any], up: list[Any], down: list[Any], dtype: str) -> None:
        self._core.gate_load.wait()
        if self._core.load_error is not None:
            raise self._core.load_error
        self.layers[layer] = tuple([widened(matrix, dtype) for matrix in group] for group in (gate, up, down))

    def seal(self) -> None:
        assert len(self.layers) == self._geometry["num_layers"]
        self.sealed = True
        for index, size in enumerate(self._bytes):
            self.arena_fds[index] = fd = os.memfd_create(f"fake:{self.name}:{index}", MEMFD_FLAGS)
            os.truncate(fd, -(-size // PAGE) * PAGE)
            os.pwrite(fd, self.text(), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)

    def text(self) -> bytes:
        """What stands in an arena, so that tests can tell one from another."""
        return f"{self.name} {self.format} {sum(float(m.sum()) for group in self.layers[0] for m in group)}".encode()

    def arenas(self) -> list[dict[str, int]]:
        return [
            {"index": index, "fd": fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), "bytes": os.fstat(fd).st_size}
            for index, fd in self.arena_fds.items()
        ]

    def close_arenas(self) -> None:
        while self.arena_fds:
            os.close(self.arena_fds.popitem()[1])

    def prefault(self) -> None:
        if self._core.prefault_error is not None:
            error, self._core.prefault_error = self._core.prefault_error, None
            raise error

    def forward_calls(self) -> int:
        return 0

    def expert_tokens(self) -> np.ndarray:
        """So that each can be told from the others: 100 times its layer and its own number."""
        layers, experts = self._geometry["num_layers"], self._geometry["num_experts"]
        return (np.arange(layers)[:, None] * 100 + np.arange(experts)[None, :]).astype(np.uint64)

    def expert_reads(self) -> int:
        return 7

    def forward(self, layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, dtype: str) -> np.ndarray:
        out = np.zeros_like(x, dtype=np.float32)
        gate, up, down = self.layers[layer]
        for token, row in enumerate(x):
            for expert, weight in zip(ids[token], weights[token], strict=True):
                if expert >= 0:
                    g, u = gate[expert] @ row, up[expert] @ row
                    out[token] += weight * (down[expert] @ (g / (1 + np.exp(-g)) * u))
        return out


class FakeRuntime:
    def __init__(self, core: FakeCore, nodes: list[dict[str, Any]]) -> None:
        self._core, self._nodes = core, nodes
        self.sessions: dict[int, tuple[FakeModel, mmap.mmap]] = {}
        self.classes: dict[int, tuple[int, int]] = {}
        self.weights: list[int] = []
        self.models: list[FakeModel] = []
        self.started = self.stopped = self.drained = False

    def plan_bytes(self, geometry: dict[str, int], format: str, nodes: list[dict[str, Any]]) -> list[int]:
        values, size = BLOCKS[format]
        rows = geometry["hidden_size"] * geometry["intermediate_size"] * 3
        total = geometry["num_layers"] * geometry["num_experts"] * -(-rows // values) * size
        return [int(total * node["share"]) for node in nodes]

    def create_model(self, name: str, geometry: dict[str, int], format: str) -> FakeModel:
        model = FakeModel(name, geometry, format, self.plan_bytes(geometry, format, self._nodes), self._core)
        self.models.append(model)
        return model

    def adopt_model(self, name: str, geometry: dict[str, int], format: str, arenas: dict[int, int]) -> FakeModel:
        model = FakeModel(name, geometry, format, self.plan_bytes(geometry, format, self._nodes), self._core)
        if {index: os.fstat(fd).st_size for index, fd in arenas.items()} != model.node_bytes():
            raise CoreError("invalid_argument", f"the arenas of {name} do not fit")
        for fd in arenas.values():
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise CoreError("hardware", f"descriptor {fd} is no sealed arena")
        model.arena_fds = {index: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for index, fd in arenas.items()}
        model.sealed = model.adopted = True
        self.models.append(model)
        return model

    def drop_model(self, model: FakeModel) -> None:
        model.dropped = True
        model.close_arenas()
        self.models.remove(model)

    def start(self) -> None:
        self.started = True

    def drain(self, timeout_s: float) -> bool:
        self.drained = True
        return not self._core.never_drains

    def stop(self) -> None:
        """The process ends: what it holds is closed."""
        self.stopped = True
        for model in self.models:
            model.close_arenas()

    def session_layout(
        self, model: FakeModel, max_tokens: int, top_k: int, element_bytes: int, num_slots: int
    ) -> dict[str, int]:
        hidden = model.geometry()["hidden_size"]
        slot = 2 * max_tokens * hidden * element_bytes + 2 * max_tokens * top_k * 4
        total = -(-(3 * PAGE + num_slots * slot) // PAGE) * PAGE
        return {
            "version_major": 1, "version_minor": 1, "num_slots": num_slots, "max_tokens": max_tokens,
            "hidden_size": hidden, "top_k": top_k, "element_bytes": element_bytes, "total_bytes": total,
        }  # fmt: skip

    def add_session(
        self, session_id: int, model: FakeModel, shm_fd: int, doorbell_fd: int, boot_id: bytes, max_tokens: int,
        top_k: int, element_bytes: int, num_slots: int, spin_us: int, priority: int = 1, share: int = 0,
    ) -> None:  # fmt: skip
        size = self.session_layout(model, max_tokens, top_k, element_bytes, num_slots)["total_bytes"]
        assert os.fstat(shm_fd).st_size == size
        memory = mmap.mmap(shm_fd, size)
        memory[:24] = b"SSHX" + b"\1\0\1\0" + boot_id
        self.sessions[session_id] = (model, memory)
        self.classes[session_id] = (priority, share)
        if self._core.add_error is not None:
            raise self._core.add_error

    def remove_session(self, session_id: int) -> None:
        self.sessions.pop(session_id, None)

    def end_session(self, session_id: int, closing: int) -> None:
        self._core.gate_end.wait()
        if session_id in self.sessions:
            self.sessions[session_id][1][CLOSING_OFFSET : CLOSING_OFFSET + 4] = closing.to_bytes(4, "little")

    def configure_session(self, session_id: int, priority: int, share: int) -> None:
        if session_id in self.sessions:
            self.classes[session_id] = (priority, share)

    def set_class_weights(self, weights: list[int]) -> None:
        self.weights = weights

    def session_stats(self) -> list[dict[str, Any]]:
        return [
            {
                "session_id": number, "requests": 3, "tokens": 12, "errors": 1, "in_flight": 0, "queued_ns": 5_000_000,
                "compute_ns": 9_000_000, "last_active_ns_ago": 1_000_000_000, "heartbeat": 7,
                "poisoned": number in self._core.poisoned, "ended": "its memory was cut short",
                "priority": self.classes[number][0], "share": self.classes[number][1], "tokens_in_flight": 16,
                "wait_us_p50": 10.0, "wait_us_p99": 250.0, "service_us_p50": 1000.0, "service_us_p99": 3000.0,
                "batched": 2, "throttled_ns": 7_000_000, "charged_ns": self._core.charged_ns.get(number, 8_000_000),
            }
            for number in list(self.sessions)
        ]  # fmt: skip

    def stats(self) -> dict[str, Any]:
        return {
            "requests_completed": 5, "requests_failed": 1, "tokens": 20, "compute_ns": 10**9,
            "busy_ns": [time.monotonic_ns() // 2] * len(self._nodes), "heartbeat_age_ns": self._core.heartbeat_age_ns,
        }  # fmt: skip


class FakeCore:
    CoreError = CoreError
    ARENA_LAYOUT_VERSION = 1

    def __init__(self, topology: dict[str, Any] | None = None) -> None:
        cpus = [[cpu] for cpu in sorted(os.sched_getaffinity(0))]
        self._topology = topology or {
            "source": "fake", "nodes": [{"node": 0, "memory_bytes": 1 << 34, "cores": cpus}]
        }  # fmt: skip
        self.free_bytes = 1 << 33
        self.gate_load = threading.Event()
        self.gate_load.set()
        self.load_error: Exception | None = None
        self.prefault_error: Exception | None = None
        self.add_error: Exception | None = None
        self.never_drains = False
        self.files_cut_short = False
        self.heartbeat_age_ns = 0
        self.poisoned: set[int] = set()
        self.gate_end = threading.Event()
        self.gate_end.set()
        self.charged_ns: dict[int, int] = {}
        self.runtime_cap = ""
        self.packing_version = 1
        self.runtime: FakeRuntime | None = None

    def cpu_name(self) -> str:
        return "imaginary CPU"

    def cpu_features(self, isa_cap: str = "") -> list[str]:
        return ["avx2", "avx512"]

    def isa_names(self) -> list[str]:
        return ISAS

    def isa_effective(self, isa_cap: str = "") -> str:
        if isa_cap and isa_cap not in ISAS:
            raise CoreError("hardware", f"there is no ISA {isa_cap!r}", f"known: {', '.join(ISAS)}")
        return isa_cap or ISAS[-1]

    def topology(self, synthetic: str = "") -> dict[str, Any]:
        return self._topology

    def node_free_bytes(self, node: int) -> int:
        return self.free_bytes

    def formats(self) -> list[str]:
        return list(BLOCKS)

    def kernels(self, isa_cap: str = "") -> list[dict[str, Any]]:
        return [
            {
                "name": f"{format}_{activation}_{isa}", "format": format, "activation": activation, "isa": isa,
                "packing": self.packing(format), "features": [], "dtypes": list(DTYPES), "rank": rank, "vendor": "",
                "usable": rank <= ISAS.index(self.isa_effective(isa_cap)),
            }
            for format in BLOCKS
            for activation in ("f32", "q8")
            for rank, isa in enumerate(ISAS)
        ]  # fmt: skip

    def packing(self, format: str) -> str:
        return f"{format}/{self.packing_version}"

    def select_kernel(self, format: str, dtype: str, isa_cap: str = "") -> str:
        return f"{format}_{'q8' if format.startswith('q') else 'f32'}_{self.isa_effective(isa_cap)}"

    def ring_abi(self) -> dict[str, Any]:
        return {"constants": {"version_major": 1, "version_minor": 1}}

    def load_operator_library(self, path: str) -> None:
        raise CoreError("hardware", f"{path}: cannot be loaded")

    def GuardedFile(self, fd: int) -> FakeFile:
        file = FakeFile(os.pread(fd, os.fstat(fd).st_size, 0))
        file.core = self
        return file

    def Runtime(  # a class of the core
        self, nodes: list[Any], isa_cap: str, spin_us: int, huge_pages: str, chunk_tokens: int
    ) -> FakeRuntime:
        self.runtime_cap = isa_cap
        self.runtime = FakeRuntime(self, nodes)
        return self.runtime
