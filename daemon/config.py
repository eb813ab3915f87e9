"""The configuration's schema: every key once, with its default, its bounds, its description and whether it is live.

Owns what a valid configuration is. Frozen models, checked when they are made; files, merging and messages are
config_files.py's, the generated manual and example are config_docs.py's. A key is one `_key(...)` row: it feeds the
file, `syshaxctl config`, docs/CONFIG.md and etc/syshaxd.toml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from syshax.protocol import Name, WeightFormat
from syshaxd.quantities import CpuList, Size

Format = Literal["bf16", "fp16", "q8_0", "q4_0"]


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


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Share = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
Distinct = AfterValidator(_distinct)
Listed = BeforeValidator(_tuple)
Group = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]


def _key(default: Any, description: str, *, live: bool, example: Any = None, **bounds: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"live": live, "example": example}, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class ComputeConfig(Section):
    """How much of the machine's CPUs the experts may use."""

    nodes: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Listed, Distinct] = _key(
        (),
        "NUMA nodes to use, in any subset and order; the first computes the first part of every expert. Empty: all "
        "nodes with usable CPUs. A node that does not exist is refused at start.",
        live=False,
        example=[0, 1],
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
        example="0-15",
    )
    shares: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)], ...], BeforeValidator(_tuple)
    ] = _key(
        (),
        "Relative part of every expert that each node computes and holds, in the order of the nodes in use. Empty: in "
        "proportion to the threads.",
        live=False,
        example=[1.0, 1.0],
    )
    isa: Annotated[str, Field(pattern=r"^[a-z0-9]*$")] = _key(
        "",
        "Cap on the instruction set: kernels above it are not chosen. Empty: the best that the CPU has. The variable "
        "SYSHAX_ISA, where it is set, wins.",
        live=False,
        example="avx2",
    )
    spin_us: int = _key(
        50,
        "Microseconds that the data plane looks for the next request before it sleeps. 0: sleep at once. Taken as 0 "
        "under a CPU quota, where spinning would eat the quota.",
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
    operator_libraries: Annotated[tuple[AbsolutePath, ...], Listed, Distinct] = _key(
        (),
        "Vendor operator libraries (shared objects exporting syshax_operators_v1), loaded in order at start.",
        live=False,
        example=["/usr/lib64/syshax/operators/vendor.so"],
    )


class PrecisionConfig(Section):
    """How weights are stored."""

    default_format: Format = _key(
        "bf16", "Format of models that are loaded without naming one: bf16, fp16, q8_0 or q4_0.", live=True
    )
    allowed_formats: Annotated[tuple[Format, ...], Listed, Distinct] = _key(
        ("bf16", "fp16", "q8_0", "q4_0"), "Formats that a load may ask for.", live=True, min_length=1
    )


class MemoryConfig(Section):
    """How much memory expert weights may take."""

    limit: Size = _key(
        0,
        "Largest sum of all loaded models' bytes. 0: what the machine (or the control group) has, less the reserve.",
        live=True,
        example="64GiB",
    )
    reserve: Size = _key("1GiB", "Memory left to the system: a load that would eat into it is refused.", live=True)


class AcceleratorConfig(Section):
    """What workers on this machine are told."""

    mode: Literal["auto", "cpu", "cuda", "npu", "maca"] = _key(
        "auto",
        "Platform that syshax-worker should run vLLM on: auto (vLLM's own detection), cpu, cuda, npu (Ascend) or maca "
        "(MetaX). Advice for workers only: the daemon itself always computes on CPUs, whatever is set here. So far "
        "only cpu has been run by this project; the others are passed on as they are.",
        live=True,
    )


class LimitsConfig(Section):
    """What clients may take. New values hold for the next request or session; nothing running is cut."""

    sessions: int = _key(64, "Attached sessions at a time.", live=True, ge=1, le=4096)
    tokens_per_session: int = _key(
        65536, "Largest number of tokens in one request that a session may ask for.", live=True, ge=1, le=1 << 20
    )
    slots: int = _key(16, "Requests that one session may have in flight (slots of its ring).", live=True, ge=1, le=64)
    shared_memory_per_session: Size = _key("4GiB", "Shared memory of one session's ring.", live=True)
    shared_memory_total: Size = _key("32GiB", "Shared memory of all sessions' rings together.", live=True)
    control_body: Size = _key("1MiB", "Largest body of a control request.", live=True)
    stopped_seconds: int = _key(
        60,
        "After how long a session ends whose process is stopped (a debugger, SIGSTOP) with its heartbeat standing "
        "still; it attaches again when it goes on. Idle clients are never ended. 0: never.",
        live=True,
        ge=0,
        le=86400,
    )
    drain_seconds: int = _key(20, "How long a stop waits for requests that were accepted.", live=True, ge=0, le=3600)


class LoggingConfig(Section):
    """The daemon's log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = _key(
        "info", "Least level that is logged: debug, info, warning or error.", live=True
    )
    format: Literal["text", "json"] = _key("text", "text, or json: one object a line.", live=True)


class AccessConfig(Section):
    """Who may do what. Root and the daemon's own user are always administrators."""

    group: Group = _key(
        "syshax",
        "Group that may use the sockets: attach, look, and load models named below. If the group does not exist, only "
        "the daemon's own user and root may.",
        live=False,
    )
    admin_group: Group = _key(
        "syshax-admin",
        "Members may load any path, unload models, end sessions and change the configuration.",
        live=True,
    )


class ModelConfig(Section):
    """A model that anyone in the group may have loaded. NAME is what clients open."""

    path: AbsolutePath = Field(
        description="Hugging Face checkpoint directory (config.json and *.safetensors).",
        json_schema_extra={"live": True, "example": "/models/Qwen3-30B-A3B"},
    )
    format: Format | None = _key(
        None, "Format of its weights. Left out: precision.default_format.", live=True, example="q4_0"
    )
    autoload: bool = _key(
        False, "Load it when the daemon starts (or when a reload brings it in). The daemon serves meanwhile.", live=True
    )


class Config(Section):
    """The whole configuration."""

    compute: ComputeConfig = ComputeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    accelerator: AcceleratorConfig = AcceleratorConfig()
    limits: LimitsConfig = LimitsConfig()
    logging: LoggingConfig = LoggingConfig()
    access: AccessConfig = AccessConfig()
    models: Mapping[Name, ModelConfig] = Field(default_factory=dict)

    def model_format(self, name: str) -> WeightFormat:
        """The format that a configured model is loaded in."""
        return WeightFormat(self.models[name].format or self.precision.default_format)


class KeyRow(BaseModel):
    """One key as the manual, the example and the reload see it."""

    key: str
    description: str
    live: bool
    default: Any
    example: Any = None
    kind: str


def key_rows() -> Iterator[KeyRow]:
    """Every key of the schema in order; [models.NAME] stands for all models."""
    for section, field in Config.model_fields.items():
        if section == "models":
            yield from _section_rows("models.NAME", ModelConfig)
        else:
            assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
            yield from _section_rows(section, field.annotation)


def _section_rows(prefix: str, section: type[Section]) -> Iterator[KeyRow]:
    schema = section.model_json_schema(mode="validation")["properties"]
    for name, field in section.model_fields.items():
        extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        yield KeyRow(
            key=f"{prefix}.{name}",
            description=field.description or "",
            live=bool(extra["live"]),
            default=None if field.is_required() else _plain_default(section, name),
            example=extra.get("example"),
            kind=_kind(schema[name]),
        )


def _plain_default(section: type[Section], name: str) -> Any:
    """The default as a TOML file would spell it."""
    whole = section.model_construct() if section is ModelConfig else section()
    return whole.model_dump(mode="json", include={name})[name]


def _kind(schema: Mapping[str, Any]) -> str:
    """Type and bounds of a JSON schema's property, in words."""
    if "anyOf" in schema:
        return _kind(next(option for option in schema["anyOf"] if option.get("type") != "null"))
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return "list, each " + _kind(schema.get("items", {}))
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "string": "text",
        "size": 'size ("512MiB", "64GiB", "20GB" or bytes)',
        "cpus": 'CPUs ("0-3,8" or a list)',
    }
    word = words.get(schema.get("type", ""), "value")
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if low is not None and high is not None:
        return f"{word} from {low} to {high}"
    return f"{word} from {low}" if low is not None else word


def live_of(key: str) -> bool:
    """Whether a dotted key of a configuration can change while the daemon runs."""
    row_key = "models.NAME." + key.rsplit(".", 1)[-1] if key.startswith("models.") else key
    return _LIVE[row_key]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables to dotted keys; lists and other values are leaves, empty tables vanish."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


_LIVE = {row.key: row.live for row in key_rows()}
