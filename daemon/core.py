"""The C++ core as an interface: what the daemon uses of it, so that tests can put another one in its place.

Owns the boundary: the Protocol, the loading of the compiled module, and the translation of its errors into the error
tree. The methods' meaning is documented in _core.pyi.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypedDict, cast

from syshax.errors import HardwareError, SyshaxError, error_from_code


class NodePlanDict(TypedDict):
    node: int
    cpus: list[int]
    threads: int
    share: float


class GeometryDict(TypedDict):
    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int


class ArenaDict(TypedDict):
    index: int
    fd: int
    bytes: int


class CoreModel(Protocol):
    @property
    def packing(self) -> str: ...
    def pool_bytes(self) -> int: ...
    def node_bytes(self) -> dict[int, int]: ...
    def huge_bytes(self) -> dict[int, int]: ...
    def kernels(self) -> dict[str, str]: ...
    def load_layer(self, layer: int, gate: list[Any], up: list[Any], down: list[Any], dtype: str) -> None: ...
    def load_packed_layer(self, layer: int, files: dict[int, tuple[int, list[int]]]) -> None: ...
    def layer_bytes(self) -> dict[int, int]: ...
    def arenas(self) -> list[ArenaDict]: ...
    def prefault(self) -> None: ...
    def seal(self) -> None: ...
    def forward_calls(self) -> int: ...


class MappedFile(Protocol):
    """A buffer of the file's bytes."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def cut_short(self) -> bool: ...
    def prefetch(self, offset: int, bytes: int) -> None: ...
    def release(self, offset: int, bytes: int) -> None: ...


class CoreRuntime(Protocol):
    def plan_bytes(self, geometry: GeometryDict, format: str, nodes: list[NodePlanDict]) -> list[int]: ...
    def create_model(self, name: str, geometry: GeometryDict, format: str) -> CoreModel: ...
    def adopt_model(self, name: str, geometry: GeometryDict, format: str, arenas: dict[int, int]) -> CoreModel: ...
    def drop_model(self, model: CoreModel) -> None: ...
    def start(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def stop(self) -> None: ...
    def session_layout(
        self, model: CoreModel, max_tokens: int, top_k: int, element_bytes: int, num_slots: int
    ) -> dict[str, int]: ...
    def add_session(
        self,
        session_id: int,
        model: CoreModel,
        shm_fd: int,
        doorbell_fd: int,
        boot_id: bytes,
        max_tokens: int,
        top_k: int,
        element_bytes: int,
        num_slots: int,
        spin_us: int,
    ) -> None: ...
    def remove_session(self, session_id: int) -> None: ...
    def session_stats(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, Any]: ...


class Core(Protocol):
    """The module's functions; `Runtime` and `GuardedFile` are its classes."""

    CoreError: type[Exception]
    ARENA_LAYOUT_VERSION: int
    PACKED_CHUNK_BYTES: int

    def cpu_name(self) -> str: ...
    def cpu_features(self, isa_cap: str = "") -> list[str]: ...
    def isa_names(self) -> list[str]: ...
    def isa_effective(self, isa_cap: str = "") -> str: ...
    def topology(self, synthetic: str = "") -> dict[str, Any]: ...
    def node_free_bytes(self, node: int) -> int: ...
    def formats(self) -> list[str]: ...
    def kernels(self, isa_cap: str = "") -> list[Any]: ...
    def select_kernel(self, format: str, dtype: str, isa_cap: str = "") -> str: ...
    def load_operator_library(self, path: str) -> None: ...
    def copy_packed(self, source: int, target: int, offset: int, bytes: int) -> list[int]: ...
    def ring_abi(self) -> dict[str, dict[str, Any]]: ...
    def GuardedFile(self, fd: int) -> MappedFile: ...
    def Runtime(
        self, nodes: list[Any], isa_cap: str, spin_us: int, huge_pages: str, chunk_tokens: int
    ) -> CoreRuntime: ...


def compiled_core() -> Core:
    """The real one. Raises HardwareError where it is not built or cannot be loaded."""
    try:
        from syshaxd import _core
    except ImportError as error:
        raise HardwareError(
            f"the compiled core cannot be loaded: {error}", "install the package, or build it: pip install ."
        ) from error
    return cast(Core, _core)


def translated(core: Core, error: Exception) -> Exception:
    """A CoreError as the error of its code; anything else unchanged."""
    if isinstance(error, core.CoreError):
        return error_from_code(getattr(error, "code", "internal"), str(error), getattr(error, "hint", ""))
    return error


@contextmanager
def core_errors(core: Core) -> Iterator[None]:
    """Calls into the core inside raise errors of the error tree."""
    try:
        yield
    except SyshaxError:
        raise
    except Exception as error:
        raise translated(core, error) from error
