"""The configuration's schema: every key once, with its default, its bounds, its description and whether it is live.

Owns what a valid configuration is. Frozen models, checked when they are made; files, merging and messages are
settings.py's and config_files.py's, the generated manual and example are config_docs.py's. A key is
one `_key(...)` row: it feeds the file, `syshaxctl config`, docs/CONFIG.md and etc/syshaxd.toml.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from syshax.protocol import AcceleratorMode, Name, WeightFormat
from syshaxd.quantities import CpuList, DiskShare, Size
from syshaxd.settings import Settings


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _distinct(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(value)) != len(value):
        raise ValueError("expected every entry once")
    return value


def _absolute(value: str) -> str:
    if not Path(value).is_absolute() or "\0" in value:
        raise ValueError("expected an absolute path")
    return value


def _absolute_or_empty(value: str) -> str:
    return _absolute(value) if value else value


ENVIRONMENT = {
    "SYSHAX_ISA": "compute.isa",
    "SYSHAX_CACHE_ENABLED": "cache.enabled",
    "SYSHAX_CACHE_DIR": "cache.directory",
}
"""Variables that set a key for one start, after all files."""

AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Share = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
Distinct = AfterValidator(_distinct)
Listed = BeforeValidator(_tuple)
Group = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]


def _key(default: Any, description: str, *, live: bool, **bounds: Any) -> Any:
    when = "Live." if live else "Needs a restart."
    return Field(default, description=f"{description} {when}", json_schema_extra={"live": live}, **bounds)


class Section(Settings):
    """A table. Strict: "4" is not a number and 1 is not true."""

    model_config = ConfigDict(strict=True)


class ComputeConfig(Section):
    """How much of the machine's CPUs the experts may use."""

    nodes: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Listed, Distinct] = _key(
        (),
        "NUMA nodes to use, in any subset and order; the first computes the first part of every expert. Empty: all "
        "nodes with usable CPUs. A node that does not exist is refused at start.",
        live=False,
    )
    threads: int = _key(
        0,
        "Threads over all nodes, each pinned to a CPU, physical cores first. 0: as many as CPUs in the process's "
        "affinity, cpuset and `cpus`, at most the control group's CPU quota. More than that is refused.",
        live=False,
        ge=0,
        le=4096,
    )
    cpus: CpuList = _key(
        (),
        'CPUs that threads may use, such as "0-15,32-47". Empty: all that the process may use. Leave CPUs out here for '
        "workers on the same machine.",
        live=False,
    )
    shares: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)], ...], BeforeValidator(_tuple)
    ] = _key(
        (),
        "Relative part of every expert that each node computes and holds, in the order of the nodes in use. Empty: in "
        "proportion to the threads.",
        live=False,
    )
    isa: Annotated[str, Field(pattern=r"^[a-z0-9]*$")] = _key(
        "",
        "Cap on the instruction set: kernels above it are not chosen. Empty: the best that the CPU has. The variable "
        "SYSHAX_ISA, where it is set, wins.",
        live=False,
    )
    spin_us: int = _key(
        1000,
        "Microseconds that the data plane looks for the next request, and a client on other CPUs for its answer, "
        "before they sleep; less by itself where that does not pay or others want the CPUs. 0: sleep at once. Taken as "
        "0 under a CPU quota, where spinning would eat the quota.",
        live=False,
        ge=0,
        le=1_000_000,
    )
    huge_pages: Literal["off", "auto", "require"] = _key(
        "auto",
        "Pages of the weights: off (4 KiB), auto (transparent huge pages where they can be had), require (reserved "
        "huge pages, or loading fails).",
        live=False,
    )
    chunk_tokens: int = _key(
        1024,
        "Tokens of a large batch computed at a time; bounds the working memory.",
        live=False,
        ge=1,
        le=65536,
    )


class OperatorsConfig(Section):
    """Formats and kernels from outside (docs/OPERATORS.md)."""

    directory: Annotated[str, AfterValidator(_absolute_or_empty)] = _key(
        "/usr/lib64/syshax/operators",
        "Directory whose operator libraries (*.so) are loaded at start, by name. A library that does not fit, or that "
        "others than root and the daemon's own user may write to, is refused with the reason and the daemon starts "
        "without it. Empty: none.",
        live=False,
    )


class PrecisionConfig(Section):
    """How weights are stored."""

    default_format: WeightFormat = _key(
        "bf16",
        "Format of models that are loaded without naming one: bf16, fp16, q8_0, q4_0, or one of an operator library.",
        live=True,
    )
    allowed_formats: Annotated[tuple[WeightFormat, ...], Listed, Distinct] = _key(
        (), "Formats that a load may ask for. Empty: every format that there is.", live=True
    )


class MemoryConfig(Section):
    """How much memory expert weights may take."""

    limit: Size = _key(
        0,
        "Largest sum of all loaded models' bytes. 0: what the machine (or the control group) has, less the reserve.",
        live=True,
    )
    reserve: Size = _key("1GiB", "Memory left to the system: a load that would eat into it is refused.", live=True)


class CacheConfig(Section):
    """Packed models on the disk, so that a second load need not convert the checkpoint (syshaxctl cache list)."""

    enabled: bool = _key(
        True, "Read and write packed models. What does not fit is not written; no load fails for it.", live=True
    )
    directory: Annotated[str, AfterValidator(_absolute_or_empty)] = _key(
        "",
        "Where they lie; for the daemon's user alone. Empty: what systemd gives (CacheDirectory=), else "
        "/var/cache/syshax, with --user $XDG_CACHE_HOME/syshax or ~/.cache/syshax.",
        live=False,
    )
    limit: DiskShare = _key(
        "50%",
        "Bytes of all entries together, or a part of the file system's size. Least recently used entries go first, "
        "never one whose model is loaded.",
        live=True,
    )
    reserve: DiskShare = _key(
        "10%", "Bytes, or a part of the file system, that stay free: no entry is written into them.", live=True
    )


class AcceleratorConfig(Section):
    """What workers on this machine are told."""

    mode: AcceleratorMode = _key(
        "auto",
        "Platform that syshax-worker must run vLLM on: auto (vLLM's own detection), cpu, cuda, npu (Ascend) or maca "
        "(MetaX). A worker whose vLLM is built for something else refuses to start. The daemon itself always "
        "computes on CPUs, whatever is set here. So far only cpu has been run by this project.",
        live=True,
    )


class LimitsConfig(Section):
    """What clients may take. New values hold for the next request or session; nothing running is cut."""

    sessions: int = _key(64, "Attached sessions at a time.", live=True, ge=1, le=4096)
    tokens_per_session: int = _key(
        65536, "Largest number of tokens in one request that a session may ask for.", live=True, ge=1, le=1 << 20
    )
    slots: int = _key(16, "Requests that one session may have in flight (slots of its ring).", live=True, ge=1, le=64)
    tokens_in_flight: int = _key(
        131072,
        "Tokens that one session may have in flight: its slots, each with a request of the largest size.",
        live=True,
        ge=1,
        le=1 << 26,
    )
    user_part: int = _key(
        75,
        "Percent of `sessions` and of `shared_memory_total` that one user may take, so that others are left some. Root "
        "and the daemon's own user may take all.",
        live=True,
        ge=1,
        le=100,
    )
    shared_memory_per_session: Size = _key("4GiB", "Shared memory of one session's ring.", live=True)
    shared_memory_total: Size = _key("32GiB", "Shared memory of all sessions' rings together.", live=True)
    control_body: Size = _key("1MiB", "Largest body of a control request.", live=True)
    stopped_seconds: int = _key(
        60,
        "Seconds after which a session ends whose process is stopped (a debugger, SIGSTOP) with its heartbeat standing "
        "still; it attaches again when it goes on. Idle clients are never ended. 0: never.",
        live=True,
        ge=0,
        le=86400,
    )
    drain_seconds: int = _key(
        20, "Seconds that a stop waits for requests that were accepted.", live=True, ge=0, le=3600
    )


ClassName = Literal["interactive", "normal", "batch"]
Weight = Annotated[int, Field(ge=1, le=1000)]


class SchedulingConfig(Section):
    """Who computes first when sessions compete. A session (one worker) has a class; idle classes cost nothing."""

    interactive: Weight = _key(
        16,
        "Weight of interactive sessions: classes that compete share the time by their weights.",
        live=True,
    )
    normal: Weight = _key(4, "Weight of normal sessions, and of those that ask for no class.", live=True)
    batch: Weight = _key(1, "Weight of batch sessions.", live=True)
    highest: ClassName = _key(
        "interactive",
        "Highest class that a client may ask for when it attaches; more is refused. Administrators may give any "
        "attached session any class (syshaxctl sessions set).",
        live=True,
    )
    share: int = _key(
        100,
        "Percent of the data plane's time that one session may take, also when nobody else wants it. Holds at once for "
        "attached sessions, but for those that `syshaxctl sessions set` gave another. 100: no limit.",
        live=True,
        ge=1,
        le=100,
    )

    def weights(self) -> list[int]:
        """As the core wants them, highest class first."""
        return [self.interactive, self.normal, self.batch]


class LoggingConfig(Section):
    """The daemon's log: standard error, and where that is the journal, records with fields (docs/CONTROL.md)."""

    level: Literal["debug", "info", "warning", "error"] = _key(
        "info", "Least level that is logged: debug, info, warning or error.", live=True
    )
    format: Literal["text", "json"] = _key("text", "text, or json: one object a line.", live=True)


class AccessConfig(Section):
    """Who may do what. Root always is an administrator, and so is the own user of a daemon started with --user."""

    group: Group = _key(
        "syshax",
        "Group that may use the sockets: attach, look, and load models named below. If the group does not exist, only "
        "the daemon's own user and root may.",
        live=False,
    )
    view_group: Group = _key(
        "syshax-view",
        "Group that may use the view socket: look at status, models and sessions, and no more. If the group does not "
        "exist, only the daemon's own user and root may.",
        live=False,
    )
    admin_group: Group = _key(
        "syshax-admin",
        "Members may load any path, unload models, end sessions and change the configuration.",
        live=True,
    )


class ModelConfig(Section):
    """A model that anyone in the group may have loaded. NAME is what clients open."""

    path: AbsolutePath = _key(
        ...,
        "Hugging Face checkpoint directory (config.json and *.safetensors).",
        live=True,
        examples=["/models/Qwen3-30B-A3B"],
    )
    format: WeightFormat | None = _key(
        None, "Format of its weights. Left out: precision.default_format.", live=True, examples=["q4_0"]
    )
    autoload: bool = _key(
        False, "Load it when the daemon starts (or when a reload brings it in). The daemon serves meanwhile.", live=True
    )


def _description(table: type[Section]) -> str:
    return " ".join((table.__doc__ or "").split())


def _table(table: type[Section]) -> Any:
    return Field(default_factory=table, description=_description(table))


class Config(Section):
    """The whole configuration."""

    compute: ComputeConfig = _table(ComputeConfig)
    operators: OperatorsConfig = _table(OperatorsConfig)
    precision: PrecisionConfig = _table(PrecisionConfig)
    memory: MemoryConfig = _table(MemoryConfig)
    cache: CacheConfig = _table(CacheConfig)
    accelerator: AcceleratorConfig = _table(AcceleratorConfig)
    limits: LimitsConfig = _table(LimitsConfig)
    scheduling: SchedulingConfig = _table(SchedulingConfig)
    logging: LoggingConfig = _table(LoggingConfig)
    access: AccessConfig = _table(AccessConfig)
    models: dict[Name, ModelConfig] = Field({}, description=_description(ModelConfig))

    @model_validator(mode="after")
    def _formats_are_allowed(self) -> Self:
        allowed = self.precision.allowed_formats
        for key, format in self.named_formats():
            if not self.allows_format(format):
                raise ValueError(f"{key} = {format!r} is not among precision.allowed_formats ({', '.join(allowed)})")
        return self

    def named_formats(self) -> Iterator[tuple[str, WeightFormat]]:
        """Every key that names the format of a model, and the format."""
        yield "precision.default_format", self.precision.default_format
        for name, model in self.models.items():
            if model.format:
                yield f"models.{name}.format", model.format

    def allows_format(self, format: WeightFormat) -> bool:
        return not self.precision.allowed_formats or format in self.precision.allowed_formats

    def model_format(self, name: str) -> WeightFormat:
        """The format that a configured model is loaded in."""
        return self.models[name].format or self.precision.default_format


def live_keys() -> Iterator[tuple[str, FieldInfo, bool]]:
    """Every key of the schema in order with its field and whether it is live; models.NAME stands for all models."""
    for section, field in Config.model_fields.items():
        table = ModelConfig if section == "models" else field.annotation
        assert isinstance(table, type) and issubclass(table, Section)
        prefix = "models.NAME" if section == "models" else section
        for name, row in table.model_fields.items():
            assert isinstance(row.json_schema_extra, dict)
            yield f"{prefix}.{name}", row, bool(row.json_schema_extra["live"])


def is_live(key: str) -> bool:
    """Whether a dotted key can change while the daemon runs."""
    return _LIVE["models.NAME." + key.rsplit(".", 1)[-1] if key.startswith("models.") else key]


_LIVE = {key: live for key, _, live in live_keys()}
