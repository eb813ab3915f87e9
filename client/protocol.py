"""Messages between clients, tools and the daemon: one pydantic model each, imported by both sides.

Two transports carry them: the attach socket (one JSON object a SEQPACKET datagram; descriptors ride along) and the
control API (HTTP+JSON on a Unix socket). Unknown fields from a newer peer are ignored on receipt in answers and
refused in requests, so that a typing error in a request is never silently dropped.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 1
RING_VERSION = 1
"""Of the shared memory's layout (SYSHAX_RING_VERSION_MAJOR): both sides must agree."""
DEFAULT_RUNTIME_DIR = "/run/syshax"
CONTROL_SOCKET = "control.sock"
VIEW_SOCKET = "view.sock"
DEFAULT_VIEW_DIR = "/run/syshax-view"
"""Where the view socket of a daemon in DEFAULT_RUNTIME_DIR lies; another's lies beside its other sockets."""
ATTACH_SOCKET = "attach.sock"
BOOT_FILE = "syshaxd.boot"
"""Beside the sockets while a daemon serves: its boot id. See sockets.daemon_boot."""
ATTACH_MESSAGE_BYTES = 16384
"""Largest datagram on the attach socket, either way."""

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

Address = Annotated[str, Field(max_length=200, pattern=r"^([!-~]+)?$")]
"""http://HOST:PORT or unix:PATH of a worker's own server. For comparison alone: the daemon never connects to it."""

AcceleratorMode = Literal["auto", "cpu", "cuda", "npu", "maca"]
"""What vLLM runs on: its own choice, CPUs, NVIDIA, Ascend, MetaX."""


WeightFormat = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[!-~]+$")]
"""How the daemon stores expert weights: one of its own formats, or one of an operator library that it has loaded."""
BUILTIN_FORMATS = ("bf16", "fp16", "q8_0", "q4_0")


class Dtype(StrEnum):
    """Element types of hidden states in the ring; `ring_code` is syshax_dtype."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def ring_code(self) -> int:
        return {"float32": 0, "float16": 1, "bfloat16": 2}[self.value]

    @property
    def bytes(self) -> int:
        return 4 if self is Dtype.FLOAT32 else 2


class ModelState(StrEnum):
    CONFIGURED = "configured"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADING = "unloading"


ModelOrigin = Literal["checkpoint", "restart", "cache"]


class Priority(StrEnum):
    """Class of a session, highest first; `code` is the core's. Weights are the daemon's configuration."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def code(self) -> int:
        return {"interactive": 0, "normal": 1, "batch": 2}[self.value]


class Closing(IntEnum):
    """syshax_ring_closing: why a session ends or has ended, as the ring's header says. docs/RING.md."""

    OPEN = 0
    DRAINING = 1
    BROKEN_QUEUE = 2
    TRUNCATED = 3
    KICKED = 4
    STOPPED = 5


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", defer_build=True)


class ErrorBody(Answer):
    code: str
    message: str
    hint: str = ""


class ErrorAnswer(Answer):
    error: ErrorBody


class Geometry(Answer):
    """The routed experts of one model. Layers count MoE layers only; `layer_ids` are their numbers in the model."""

    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    layer_ids: list[int]


# ---------------------------------------------------------------- attach socket


class AttachRequest(Request):
    """The first and only datagram of a client; the connection is the lease from then on."""

    protocol: int = PROTOCOL_VERSION
    model: Name
    client: str = Field(default="", max_length=200)
    max_tokens: int = Field(ge=1, le=1 << 20)
    top_k: int | None = Field(default=None, ge=1, le=4096)
    """Largest top_k a request will use; None: the model's."""
    dtype: Dtype = Dtype.FLOAT32
    """The largest dtype a request will use: sizes the slots."""
    num_slots: int = Field(default=2, ge=1, le=64)
    priority: Priority = Priority.NORMAL
    fingerprint: str | None = None
    """Of the client's own checkpoint; the daemon refuses when it holds another."""
    cpus: list[int] = Field(default_factory=list)
    """CPUs the client's threads may use, so that spinning can give way where they are shared."""
    address: Address = ""
    """Where this worker answers HTTP, so that whoever sends it requests can tell its sessions; empty: not known."""


class RingLayout(Answer):
    """Mirrors syshax_ring_header; the client checks one against the other."""

    version_major: int
    version_minor: int
    num_slots: int
    max_tokens: int
    hidden_size: int
    top_k: int
    element_bytes: int
    total_bytes: int


class AttachAnswer(Answer):
    """Comes with two descriptors: the session's shared memory and the doorbell eventfd."""

    protocol: int = PROTOCOL_VERSION
    boot_id: str
    session_id: int
    model: str
    format: WeightFormat
    fingerprint: str
    geometry: Geometry
    layout: RingLayout


# ------------------------------------------------------------------ control API


class LoadRequest(Request):
    """POST /v1/models (administrators) — or with `path` left out, for a model named in the configuration (anyone)."""

    name: Name
    path: str | None = None
    format: WeightFormat | None = None


class Progress(Answer):
    stage: str = ""
    """checking, reserving, converting or reading from the cache, sealing, keeping"""
    layers_done: int = 0
    layers_total: int = 0
    bytes_done: int = 0
    """Bytes of the pool filled."""
    bytes_total: int = 0
    seconds: float = 0.0


class ModelInfo(Answer):
    name: str
    path: str
    format: WeightFormat
    state: ModelState
    reason: str = ""
    """Why it failed."""
    origin: ModelOrigin = "checkpoint"
    """Where its bytes came from: read and packed, kept over a restart of the daemon, or read packed from the cache."""
    configured: bool = False
    architecture: str = ""
    geometry: Geometry | None = None
    fingerprint: str = ""
    progress: Progress = Progress()
    node_bytes: dict[int, int] = {}
    kernels: dict[Dtype, str] = {}
    sessions: int = 0
    forward_calls: int = 0
    """Layer requests completed for this model since it was loaded."""


class ModelsAnswer(Answer):
    boot_id: str
    models: list[ModelInfo]


class ExpertsAnswer(Answer):
    """How often each expert of a model was asked for since the model was loaded, and what that read."""

    boot_id: str
    name: str
    layers: int
    experts: int
    layer_ids: list[int] = []
    """The layers' numbers in the model."""
    tokens: list[list[int]]
    """[layers][experts]: tokens that were routed to it."""
    expert_bytes: int = 0
    """Bytes of one expert's weights, the average."""
    bytes_read: int = 0
    """Of weights, on all nodes: once for each chunk of tokens that has any for an expert."""


class SessionInfo(Answer):
    session_id: int
    model: str
    client: str
    address: str = ""
    """Of its worker's HTTP server, as that said it."""
    pid: int
    uid: int
    priority: Priority
    share: int = 100
    """Percent of the data plane's time that it may take; 100: no limit."""
    attached_seconds: float
    max_tokens: int
    num_slots: int
    shm_bytes: int
    requests: int
    tokens: int
    errors: int
    in_flight: int
    tokens_in_flight: int = 0
    queued_ms_total: float
    compute_ms_total: float
    use: float = 0.0
    """Part of the data plane's time that was spent on it in the last seconds, 0 to 1."""
    wait_ms_p50: float = 0.0
    """From a request's arrival to its start, since the session attached; within an eighth, as all of these."""
    wait_ms_p99: float = 0.0
    service_ms_p50: float = 0.0
    """From a request's start to its answer: computing, and others' slices between its own."""
    service_ms_p99: float = 0.0
    batched: int = 0
    """Requests that were computed together with another session's."""
    throttled_ms_total: float = 0.0
    """Time in which it had work and its share was used up."""
    client_wait_ms_total: float = 0.0
    """From submit to seeing the answer, as the client measured: queue, compute and the ring's own time."""
    last_active_seconds: float
    stale: bool = False
    """The client has requests outstanding or the connection, but its heartbeat stands still."""


class SessionsAnswer(Answer):
    boot_id: str
    sessions: list[SessionInfo]


class SessionChange(Request):
    """PATCH /v1/sessions/{id}: what is left out stays. Holds as long as the session."""

    priority: Priority | None = None
    share: int | None = Field(default=None, ge=1, le=100)


class NodeInfo(Answer):
    node: int
    cpus: list[int]
    """CPUs our threads run on."""
    threads: int
    share: float
    """Part of intermediate_size that this node computes."""
    memory_bytes: int
    free_bytes: int
    pool_bytes: int
    """Bytes of experts held here."""
    huge_bytes: int = 0
    busy_fraction: float = 0.0
    """Of the last seconds, how much the node's threads computed."""


class StatusAnswer(Answer):
    version: str
    boot_id: str
    pid: int
    state: Literal["starting", "ready", "degraded", "draining"]
    reason: str = ""
    uptime_seconds: float
    cpu: str
    isa: str
    isa_best: str
    nodes: list[NodeInfo]
    models: list[ModelInfo]
    sessions: int
    requests_completed: int
    requests_failed: int
    tokens: int
    compute_seconds: float
    pool_bytes: int
    memory_limit_bytes: int
    accelerator_mode: AcceleratorMode = "auto"
    warnings: list[str] = []


class TopologyAnswer(Answer):
    boot_id: str
    source: str
    nodes: list[dict[str, Any]]
    allowed_cpus: list[int]
    quota_cpus: float | None
    plan: list[NodeInfo]


class KernelInfo(Answer):
    name: str
    format: str
    activation: str
    isa: str
    packing: str
    usable: bool
    """This CPU and the ISA cap allow it."""
    chosen_for: list[Dtype]
    """Ring dtypes that would use it now."""
    vendor: str = "syshax"


class OperatorLibrary(Answer):
    """A file of the operators directory (or the directory itself, where nothing in it may be trusted)."""

    path: str
    loaded: bool
    reason: str = ""
    """Why it was refused; the daemon goes on without it."""
    formats: list[str] = []
    kernels: list[str] = []


class KernelsAnswer(Answer):
    boot_id: str
    cpu_features: list[str]
    isa: str
    kernels: list[KernelInfo]
    libraries: list[OperatorLibrary] = []


class Origin(Answer):
    """Where a value came from."""

    kind: Literal["default", "file", "drop-in", "state", "environment", "command line"]
    where: str = ""
    """The file or the variable."""
    line: int | None = None
    """In the file, from 1."""


class StartOption(Answer):
    """What the daemon was started with that is no key of the configuration: its directories and its main file."""

    name: str
    value: str
    origin: Origin


class ConfigAnswer(Answer):
    boot_id: str
    effective: dict[str, Any]
    sources: dict[str, str]
    """Dotted key -> file (or "state", "environment VARIABLE") that set it; defaults are left out."""
    origins: dict[str, Origin] = {}
    """Every dotted key -> where its value in force came from."""
    start: list[StartOption] = []
    needs_restart: list[str] = []
    """Keys whose configured value is not the running one."""


class ConfigSetRequest(Request):
    """PATCH /v1/config: dotted key -> new value; null removes the persisted one."""

    values: dict[str, Any]


class ConfigChangeAnswer(Answer):
    boot_id: str
    applied: list[str]
    needs_restart: list[str]
    unchanged: list[str] = []
    message: str = ""


class Check(Answer):
    name: str
    ok: bool
    level: Literal["ok", "warning", "error"] = "ok"
    message: str
    cost: str = ""
    """What it costs to leave it so."""
    hint: str = ""
    """The command that mends it."""


class DoctorAnswer(Answer):
    boot_id: str
    checks: list[Check]
    versions: dict[str, str] = {}
    """The daemon's "syshax", "protocol" and "ring", for comparison with the client's."""


class CacheEntry(Answer):
    """One packed model on the disk."""

    key: str
    name: str
    """Of the model that it was written for; any load of that checkpoint, format and plan uses it."""
    path: str
    format: str
    fingerprint: str
    bytes: int
    used_at: float
    """Seconds since the epoch."""
    in_use: bool
    """A daemon has the model loaded, or reads or writes it."""
    useless: str = ""
    """Why no load can use it any more."""


class CacheAnswer(Answer):
    """Entries in the order in which they would go: least recently used first."""

    boot_id: str
    enabled: bool
    directory: str = ""
    bytes: int = 0
    limit_bytes: int = 0
    reserve_bytes: int = 0
    free_bytes: int = 0
    entries: list[CacheEntry] = []


class CachePruneRequest(Request):
    """POST /v1/cache/prune: these entries; else all of them, or those that are of no use any more. Never one in use."""

    keys: list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]] = []
    all: bool = False


class CachePruneAnswer(Answer):
    boot_id: str
    removed: list[str]
    kept: list[str]
    """Asked for, but in use."""
    bytes: int
    """Freed."""


class UnloadAnswer(Answer):
    boot_id: str
    name: str
    state: str


class RestartRequest(Request):
    """POST /v1/restart (administrators). Without drain, requests being computed end; their clients send them again."""

    drain: bool = True


class RestartAnswer(Answer):
    """The daemon with this boot id is about to end; the next one has another."""

    boot_id: str
    pid: int
