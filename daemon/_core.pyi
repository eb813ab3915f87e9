"""The C++ core as the daemon sees it: the contract between csrc/bindings and Python.

All blocking calls release the GIL. Errors are CoreError with a code of syshax.errors. Sizes are bytes.
"""

from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

class CoreError(Exception):
    code: str
    hint: str

# ---- hardware -------------------------------------------------------------
def cpu_name() -> str: ...
def cpu_features(isa_cap: str = "") -> list[str]: ...
def isa_names() -> list[str]: ...
def isa_effective(isa_cap: str = "") -> str:
    """The strongest ISA name that this CPU has and the cap allows. Unknown cap: CoreError("hardware")."""

def topology(synthetic: str = "") -> dict[str, Any]:
    """hwloc's view: {"source": str, "nodes": [{"node": int, "memory_bytes": int, "cores": [[cpu, ...], ...]}]}
    with cores as lists of sibling CPUs in core order, regardless of affinity; a synthetic hwloc description makes an
    imaginary machine."""

def node_free_bytes(node: int) -> int:
    """Free plus reclaimable bytes of a NUMA node; -1 or an unknown node: the machine's MemAvailable."""

class Arena:
    """One memory mapping on one NUMA node, backed by a memfd (csrc/include/syshax/memory_manager.h). The models' own
    are inside Runtime; this is for tests and for taking over descriptors. Errors: "no_memory", "hardware"."""

    def __init__(self, name: str, bytes: int, node: int = -1, huge_pages: str = "auto") -> None: ...
    @staticmethod
    def adopt(fd: int, node: int = -1) -> Arena:
        """Maps a sealed arena's descriptor read-only and takes the descriptor over."""
    def populate(self, offset: int, bytes: int) -> None: ...
    def seal(self) -> None: ...
    def fileno(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def huge_bytes(self) -> int:
        """Known once sealed or adopted."""
    def read(self, offset: int, bytes: int) -> bytes: ...

# ---- formats and kernels (tests, bench, status) -----------------------------
def formats() -> list[str]: ...
def format_blocks(format: str) -> tuple[int, int]:
    """(values, bytes) of one block; (0, 0) where a block is a whole row."""

def format_row_bytes(format: str, values: int) -> int:
    """Bytes of a row of so many values."""

def encode(format: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The blocks of one row, or of the rows of a matrix, one after the other."""

def decode(format: str, blocks: npt.NDArray[np.uint8], values: int) -> npt.NDArray[np.float32]: ...

class KernelDict(TypedDict):
    name: str
    format: str
    activation: str
    isa: str
    packing: str
    features: list[str]
    dtypes: list[str]
    rank: int
    usable: bool
    vendor: str

def kernels(isa_cap: str = "") -> list[KernelDict]: ...
def select_kernel(format: str, dtype: str, isa_cap: str = "") -> str: ...
def select_kernel_for(format: str, dtype: str, features: list[str]) -> str:
    """The choice on an imaginary CPU with these features. For tests."""

def load_operator_library(path: str) -> None: ...
def operator_checks() -> dict[str, list[str]]:
    """The conformance checks by kind, "format" and "kernel", in the order in which they are best run."""

def check_operator(kind: str, name: str, check: str) -> tuple[bool, str]:
    """One check of one row: whether it passed, and what is wrong or a figure. A row that touches memory which is not
    its own may end the process."""

def run_kernel(
    kernel: str, blocks: npt.NDArray[np.uint8], rows: int, k: int, activations: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Packs [rows, k] format blocks (k already a multiple of the block), packs activations [tokens, k] and
    multiplies: [tokens, rows] float32. For tests and bench."""

def pack_unpack(kernel: str, blocks: npt.NDArray[np.uint8], rows: int, k: int) -> npt.NDArray[np.uint8]:
    """blocks -> packed -> blocks; equal to its input."""

def vector_isas() -> list[str]:
    """ISAs whose element-wise operations this CPU can run, weakest first."""

def vector_op(isa: str, op: str, *arrays: Any) -> npt.NDArray[Any]:
    """That ISA's silu_mul(tile), accumulate(weight, src, dst), widen(src, dtype) or narrow(src, dtype); the changed
    array comes back. For tests."""

# ---- checkpoint files and packed files -----------------------------------------
def copy_packed(source: int, target: int, offset: int, bytes: int) -> list[int]:
    """Copies the range from one descriptor to the same place of another, onto the disk, past the page cache, by a
    thread that lets all others go first, and gives
    the xxh64 of each PACKED_CHUNK_BYTES of it, the last of the rest. Needs one chunk of memory. Raises OSError."""

def xxh64(data: Any, seed: int = 0) -> int:
    """The checksum of a buffer's bytes."""

class GuardedFile:
    """The file behind a descriptor, mapped whole for reading: a read-only buffer of its bytes, alive as long as an
    array looks into it. Where it is cut short meanwhile, reads give zeros instead of SIGBUS. Raises
    CoreError("checkpoint")."""

    def __init__(self, fd: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def cut_short(self) -> bool:
        """Whether a read has met the missing end: what was read is not to be believed."""
    def prefetch(self, offset: int, bytes: int) -> None: ...
    def release(self, offset: int, bytes: int) -> None:
        """The pages leave this process; the page cache may keep them."""

# ---- runtime ----------------------------------------------------------------
class NodePlan(TypedDict):
    node: int  # NUMA node to bind memory to, -1: not bound
    cpus: list[int]  # one pinned thread for each; empty list with threads > 0: unpinned
    threads: int  # computing threads; on the first node the dispatcher (or the caller of forward) is one of them
    share: float  # relative part of intermediate_size

class GeometryDict(TypedDict):
    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int

PACKED_CHUNK_BYTES: int
"""One checksum of load_packed_layer covers so many bytes of a layer in an arena, the layer's last one the rest."""

ARENA_LAYOUT_VERSION: int
"""Of what csrc/moe/layout.h says; a packing has a version of its own in its name."""

class ArenaDict(TypedDict):
    index: int  # of the plan's node
    fd: int  # a duplicate, closed on exec; the caller closes it
    bytes: int

class Model:
    name: str
    format: str
    packing: str
    def geometry(self) -> GeometryDict: ...
    def pool_bytes(self) -> int: ...
    def node_bytes(self) -> dict[int, int]:
        """Bytes held for each index of the plan."""
    def huge_bytes(self) -> dict[int, int]: ...
    def kernels(self) -> dict[str, str]:
        """dtype -> kernel name."""
    def load_layer(self, layer: int, gate: list[Any], up: list[Any], down: list[Any], dtype: str) -> None:
        """One array (any buffer of num_experts matrices, C order) for each expert: gate and up [intermediate_size,
        hidden_size], down [hidden_size, intermediate_size], of dtype float32, float16 or bfloat16 (as uint16).
        Converted and packed by the nodes' own threads in parallel; may run while other models serve."""
    def load_packed_layer(self, layer: int, files: dict[int, tuple[int, list[int]]]) -> None:
        """Instead of load_layer: plan index -> (descriptor of a file laid out as the node's arena, xxh64 of each of the
        layer's chunks). Read by the nodes' own threads. CoreError("checkpoint") for bytes that are not those."""
    def layer_bytes(self) -> dict[int, int]:
        """Of each index of the plan: the bytes of one layer; layer n begins at n times as many."""
    def fill_random(self, seed: int) -> None:
        """Every layer gets weights that need no checkpoint, all experts different. For benches."""
    def arenas(self) -> list[ArenaDict]:
        """Of a sealed model, in the plan's order; a node without a share has none."""
    def prefault(self) -> None:
        """Maps the pages of an adopted model before requests meet them; it may serve meanwhile."""
    def seal(self) -> None:
        """All layers are there: forbids writes; the model may be used from now on."""
    def forward_calls(self) -> int: ...
    def expert_tokens(self) -> npt.NDArray[np.uint64]:
        """[num_layers, num_experts]: the tokens that each expert has had since the model was made or adopted."""
    def expert_reads(self) -> int:
        """How many times some expert's weights were read, once for each chunk of tokens that has any for it."""
    def forward(
        self,
        layer: int,
        hidden_states: npt.NDArray[Any],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        dtype: str,
        interrupted: bool = False,
        part_tokens: list[int] = ...,
    ) -> npt.NDArray[Any]:
        """The layer without ring or session (tests, bench); hidden_states as float32, float16, uint16 for bfloat16.
        interrupted: as often as can be; part_tokens: as if so many tokens each came from sessions of their own."""
    def dequantized(self, layer: int, expert: int) -> tuple[npt.NDArray[np.float32], ...]:
        """(gate, up, down) as the kernels see them, read back from the packed weights."""

class Runtime:
    """Thread pools and models of one process; start() adds the dispatcher."""

    def __init__(
        self,
        nodes: list[NodePlan],
        isa_cap: str = "",
        spin_us: int = 50,
        huge_pages: str = "auto",
        chunk_tokens: int = 1024,
    ) -> None: ...
    @staticmethod
    def plan_bytes(geometry: GeometryDict, format: str, nodes: list[NodePlan]) -> list[int]:
        """Arena bytes each node will need."""
    def create_model(self, name: str, geometry: GeometryDict, format: str) -> Model:
        """Reserves and populates the arenas; CoreError("no_memory") with the numbers."""
    def adopt_model(self, name: str, geometry: GeometryDict, format: str, arenas: dict[int, int]) -> Model:
        """A sealed model from arenas that another process filled: index of the plan's node -> descriptor, which stays
        the caller's. No bytes are read or copied. CoreError("hardware") for a descriptor that is no sealed arena,
        CoreError("invalid_argument") for one too few, too many, or of another size."""
    def drop_model(self, model: Model) -> None:
        """Sessions of it get MODEL_GONE; memory is freed after the request in flight. Returns when it is freed."""
    def start(self) -> None: ...
    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests with SHUTTING_DOWN, waits for those accepted; False: time ran out."""
    def stop(self) -> None: ...
    def session_layout(
        self, model: Model, max_tokens: int, top_k: int, element_bytes: int, num_slots: int
    ) -> dict[str, int]:
        """The fields of syshax_ring_header, total_bytes included, before the memory exists."""
    def add_session(
        self,
        session_id: int,
        model: Model,
        shm_fd: int,
        doorbell_fd: int,
        boot_id: bytes,
        max_tokens: int,
        top_k: int,
        element_bytes: int,
        num_slots: int,
        spin_us: int,
        priority: int = 1,
        share: int = 0,
    ) -> None:
        """Maps the memory (sized and reserved by the caller), writes the header, serves it. Duplicates descriptors.
        priority: 0 interactive, 1 normal, 2 batch. share: percent of the data plane's time at most; 0: all."""
    def remove_session(self, session_id: int) -> None:
        """Returns when nothing touches its memory any more (at most the request in flight)."""
    def end_session(self, session_id: int, closing: int) -> None:
        """Serves it no more and writes why, a syshax_ring_closing, into its header. Unknown ids are ignored."""
    def configure_session(self, session_id: int, priority: int, share: int) -> None:
        """As in add_session. Unknown ids are ignored."""
    def set_class_weights(self, weights: list[int]) -> None:
        """Of interactive, normal and batch, 1 to 10000: how classes that have work share the data plane's time."""
    def session_stats(self) -> list[dict[str, Any]]:
        """session_id, requests, tokens, errors, in_flight, queued_ns, compute_ns, last_active_ns_ago, heartbeat,
        client_wait_ns, poisoned (it is served no more: end its connection) and ended (why: "" or a text); priority,
        share, charged_ns (its part of the data plane's time: a batch's is divided among its sessions), batched
        (requests computed together with another session's), throttled_ns, tokens_in_flight, wait_us_p50, wait_us_p99
        (from seeing a request to starting it), service_us_p50, service_us_p99 (from there to its end)."""
    def stats(self) -> dict[str, Any]:
        """requests_completed, requests_failed, tokens, compute_ns, busy_ns (one number for each node),
        heartbeat_age_ns (of the dispatcher: how long since its last turn; 0 while it sleeps with nothing to do)."""

# ---- bench --------------------------------------------------------------------
class LimitBench:
    """What the plan's threads can do at most. bytes: of memory to read, many times the caches."""

    def __init__(self, nodes: list[NodePlan], isa_cap: str, spin_us: int, bytes: int) -> None: ...
    def measure(self, limit: str, seconds: float) -> list[tuple[str, float, float]]:
        """Limit "read", "fp32", "bf16", "int8" or "int4" -> (loop, bytes or operations a second at best, and the median
        of this call's repetitions), best first. The calling thread computes as the plan's first: pin it before."""

def bench_ring(seconds: float, payload_bytes: int, client_cpu: int, daemon_cpu: int) -> dict[str, float]:
    """spin_us_p50, spin_us_p99, parked_us_p50 and floors floor_spin_us, floor_parked_us, with a null model."""

# ---- for tests of the ring ------------------------------------------------------
def ring_abi() -> dict[str, dict[str, Any]]:
    """struct name -> {"size": int, "fields": {name: [offset, bytes]}} as compiled; constants under "constants"."""

class TestHarness:
    """A dispatcher over a fake model, without kernels. The model's output elements are, as unsigned integers of the
    dtype's width: hidden_states + layer + sum over k of (topk_ids + 1) * bits(topk_weights), wrapping."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        spin_us: int = 0,
        cpus: list[int] = ...,
        worker_thread: bool = False,
    ) -> None:
        """worker_thread: each forward runs on a thread of its own, as kernels do."""
    def layout(self, max_tokens: int, top_k: int, element_bytes: int, num_slots: int) -> dict[str, int]: ...
    def add_session(
        self,
        session_id: int,
        shm_fd: int,
        doorbell_fd: int,
        boot_id: bytes,
        max_tokens: int,
        top_k: int,
        element_bytes: int,
        num_slots: int,
        spin_us: int = 0,
        priority: int = 1,
        share: int = 0,
    ) -> None: ...
    def end_session(self, session_id: int, closing: int) -> None: ...
    def remove_session(self, session_id: int) -> None: ...
    def forget_model(self) -> None: ...
    def model_alive(self) -> bool:
        """False once forget_model() has returned and nothing holds the model."""
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def session_stats(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, Any]: ...
    def hold(self) -> None:
        """Forwards stay inside until release()."""
    def release(self) -> None: ...
    def set_delay_us(self, delay_us: int) -> None:
        """Of each token; slices end between tokens."""
    def forward_calls(self) -> int: ...
    def forwards_running(self) -> int: ...
