"""What a set of packed arenas is: the description that lies beside them, and whether this daemon may use them.

Owns the description's text with its checksum and every check that needs no look at the arenas' bytes. It serves arenas
that outlive the daemon in the service manager's store (keeping.py) and arenas in files alike: there each arena's
digest is filled in too. Nothing is believed that is not checked here: another version of this program wrote it, or
somebody who should not.
"""

from __future__ import annotations

import hashlib
import mmap
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from syshax.errors import SyshaxError
from syshax.protocol import Geometry, Name, WeightFormat
from syshaxd.config import Config
from syshaxd.core import Core, CoreModel, CoreRuntime, GeometryDict, core_errors
from syshaxd.planner import Plan
from syshaxd.quantities import human_size

if TYPE_CHECKING:
    from syshaxd.loader import Blueprint

VERSION = 1
"""Of the description's fields; a daemon uses no other."""
LARGEST_BYTES = 16 << 20
"""More than any checkpoint's list of files takes."""
_MAGIC = b"syshax-packed"
_HUGE_PAGE = 2 << 20
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
HugePages = Literal["off", "auto", "require"]


class UnusableError(Exception):
    """Arenas that this daemon cannot use; the text says why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class FileStamp(_Part):
    """What a file of the checkpoint looked like when it was read."""

    size: int
    mtime_ns: int


class NodeShare(_Part):
    """One node of the plan that the arenas were cut for; -1: memory was not bound."""

    node: int
    share: float = Field(gt=0, allow_inf_nan=False)


class ArenaFacts(_Part):
    """One arena: `index` of its node in the plan, its size, and for one in a file the sha256 of its bytes."""

    index: int = Field(ge=0)
    bytes: int = Field(gt=0)
    sha256: Hex = ""


class ConfiguredAs(_Part):
    """A model of the configuration: [models.NAME]."""

    path: str
    format: WeightFormat


class PackedModel(_Part):
    """A complete model in arenas."""

    version: int = VERSION
    generation: str = Field(default_factory=lambda: secrets.token_hex(8), pattern=r"^[0-9a-f]{16}$")
    """Of this one load: keeps the arenas of two loads under one name apart."""
    name: Name
    path: str
    configured: ConfiguredAs | None
    """What the configuration said of this name when it was loaded."""
    format: WeightFormat
    architecture: str
    geometry: Geometry
    fingerprint: str
    files: dict[str, FileStamp]
    """config.json and every file with experts."""
    packing: str
    """The core's name of it, which ends in its version."""
    layout_version: int
    """Of the order of experts and rows in an arena."""
    isa: str
    kernels: dict[str, str]
    """What the arenas were packed for; a format has one packing, so that others may read them."""
    huge_pages: HugePages
    nodes: tuple[NodeShare, ...]
    arenas: tuple[ArenaFacts, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        indices = [arena.index for arena in self.arenas]
        if indices != sorted(set(indices)) or any(index >= len(self.nodes) for index in indices):
            raise ValueError(f"arenas {indices} for {len(self.nodes)} nodes")
        return self

    @property
    def total_bytes(self) -> int:
        return sum(arena.bytes for arena in self.arenas)

    @property
    def core_geometry(self) -> GeometryDict:
        return core_geometry(self.geometry)


def core_geometry(geometry: Geometry) -> GeometryDict:
    return {
        "num_layers": geometry.num_layers,
        "num_experts": geometry.num_experts,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "top_k": geometry.top_k,
    }


# ------------------------------------------------------------------------ text


def to_bytes(packed: PackedModel) -> bytes:
    """One line with the checksum, then JSON."""
    body = packed.model_dump_json().encode()
    return b"%s %d %s\n%s" % (_MAGIC, VERSION, hashlib.sha256(body).hexdigest().encode(), body)


def from_bytes(text: bytes) -> PackedModel:
    """Raises UnusableError for whatever to_bytes() of this version has not written, down to the last bit."""
    if len(text) > LARGEST_BYTES:
        raise UnusableError(f"the manifest has {len(text)} bytes, at most {LARGEST_BYTES} are read")
    head, _, body = text.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC:
        raise UnusableError("the manifest does not begin as one")
    if words[1] != b"%d" % VERSION:
        raise UnusableError(f"the manifest is of version {words[1][:20]!r}, this daemon knows {VERSION}")
    if words[2] != hashlib.sha256(body).hexdigest().encode():
        raise UnusableError("the manifest's checksum does not match: it is damaged or cut short")
    try:
        packed = PackedModel.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnusableError(f"the manifest's {where or 'fields'}: {first['msg']}") from None
    if packed.version != VERSION:
        raise UnusableError(f"the manifest's fields are of version {packed.version}, this daemon knows {VERSION}")
    return packed


# ---------------------------------------------------------------------- making


def describe(
    core: Core, plan: Plan, model: CoreModel, blueprint: Blueprint, name: str, config: Config, isa: str
) -> PackedModel:
    """The description of a model that was just loaded and sealed. isa: in effect."""
    return PackedModel(
        name=name,
        path=str(blueprint.path),
        configured=configured_as(config, name),
        format=blueprint.format,
        architecture=blueprint.architecture.name,
        geometry=blueprint.geometry,
        fingerprint=blueprint.fingerprint,
        files=blueprint.files,
        packing=model.packing,
        layout_version=core.ARENA_LAYOUT_VERSION,
        isa=isa,
        kernels=model.kernels(),
        huge_pages=config.compute.huge_pages,
        nodes=plan_nodes(plan),
        arenas=tuple(ArenaFacts(index=index, bytes=size) for index, size in model.node_bytes().items() if size),
    )


def plan_nodes(plan: Plan) -> tuple[NodeShare, ...]:
    return tuple(NodeShare(node=node.node if node.bind else -1, share=node.share) for node in plan.nodes)


def configured_as(config: Config, name: str) -> ConfiguredAs | None:
    """What the configuration says of a name now."""
    model = config.models.get(name)
    return ConfiguredAs(path=model.path, format=config.model_format(name)) if model else None


def stamps(files: Mapping[str, Path]) -> dict[str, FileStamp]:
    """What the files look like now. Raises OSError."""
    found = {}
    for name, file in files.items():
        status = file.stat()
        found[name] = FileStamp(size=status.st_size, mtime_ns=status.st_mtime_ns)
    return found


# -------------------------------------------------------------------- checking


def check_usable(core: Core, runtime: CoreRuntime, plan: Plan, packed: PackedModel, huge: HugePages) -> None:
    """Raises UnusableError where this version, plan or configuration would read the arenas otherwise than they were
    written. huge: compute.huge_pages, of which "require" is a promise."""
    packings = {row["format"]: row["packing"] for row in core.kernels()}
    if packed.format not in packings:
        raise UnusableError(f"there is no format {packed.format} any more")
    if packed.packing != packings[packed.format]:
        raise UnusableError(f"it is packed as {packed.packing}, this version packs as {packings[packed.format]}")
    if packed.layout_version != core.ARENA_LAYOUT_VERSION:
        raise UnusableError(
            f"its arenas' layout is version {packed.layout_version}, this version's {core.ARENA_LAYOUT_VERSION}"
        )
    if packed.nodes != plan_nodes(plan):
        raise UnusableError(f"it was cut for {_text(packed.nodes)}, the plan is now {_text(plan_nodes(plan))}")
    if packed.huge_pages != huge and "require" in (packed.huge_pages, huge):
        raise UnusableError(f"it was loaded with compute.huge_pages = {packed.huge_pages}, which is now {huge}")
    _check_sizes(core, runtime, plan, packed)


def _text(nodes: tuple[NodeShare, ...]) -> str:
    return ", ".join(f"node {node.node} with {node.share:.4g}" for node in nodes)


def _check_sizes(core: Core, runtime: CoreRuntime, plan: Plan, packed: PackedModel) -> None:
    try:
        with core_errors(core):
            wanted = runtime.plan_bytes(
                packed.core_geometry, packed.format, [node.as_core_plan() for node in plan.nodes]
            )
    except SyshaxError as error:
        raise UnusableError(f"its geometry is refused: {error}") from None
    page = _HUGE_PAGE if packed.huge_pages == "require" else mmap.PAGESIZE
    expected = {index: -(-size // page) * page for index, size in enumerate(wanted) if size}
    held = {arena.index: arena.bytes for arena in packed.arenas}
    if held != expected:
        raise UnusableError(
            f"its arenas hold {human_size(sum(held.values()))} ({held}), this version needs {expected} for it"
        )


def check_same_files(packed: PackedModel, path: Path) -> bool:
    """Whether the checkpoint's files look as they did when they were read. Raises OSError where they cannot be seen."""
    return stamps({name: path / name for name in packed.files}) == packed.files
