"""llama.cpp: the graph of a MoE feed-forward layer built through ggml's C API.

The libraries come from the folder that $SYSHAX_PEER_GGML names (a llama.cpp build with shared libraries), or from an
installed llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from syshaxd.bench.peers import PeerAbsentError

FOLDER_VARIABLE = "SYSHAX_PEER_GGML"
F32, F16, Q4_0, Q8_0, I32, BF16 = 0, 1, 2, 8, 26, 30
TYPES = {"bf16": (BF16, 1, 2), "f16": (F16, 1, 2), "q8_0": (Q8_0, 32, 34), "q4_0": (Q4_0, 32, 18)}
"""ggml's number, values and bytes of a block."""
SCALES = {"q8_0": 0.0003, "q4_0": 0.004}
WEIGHT_BUFFERS = 1
GRAPH_TENSORS = 256


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", ctypes.c_bool)]


P, N = c_void_p, c_int64
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (P, [InitParams]),
    "ggml_free": (None, [P]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_nbytes": (c_size_t, [P]),
    "ggml_new_tensor_2d": (P, [P, c_int, N, N]),
    "ggml_new_tensor_3d": (P, [P, c_int, N, N, N]),
    "ggml_set_input": (None, [P]),
    "ggml_set_output": (None, [P]),
    "ggml_mul_mat_id": (P, [P, P, P, P]),
    "ggml_swiglu_split": (P, [P, P, P]),
    "ggml_mul": (P, [P, P, P]),
    "ggml_add": (P, [P, P, P]),
    "ggml_cont": (P, [P, P]),
    "ggml_view_2d": (P, [P, P, N, N, c_size_t, c_size_t]),
    "ggml_new_graph": (P, [P]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_gallocr_new": (P, [P]),
    "ggml_gallocr_free": (None, [P]),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, [P, P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
    "ggml_backend_buffer_set_usage": (None, [P, c_int]),
    "ggml_backend_buft_name": (c_char_p, [P]),
    "ggml_backend_tensor_set": (None, [P, P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [P, P, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [P, P]),
    "ggml_backend_get_device": (P, [P]),
    "ggml_backend_dev_backend_reg": (P, [P]),
    "ggml_backend_reg_get_proc_address": (P, [P, c_char_p]),
    "ggml_backend_cpu_init": (P, []),
    "ggml_backend_cpu_set_n_threads": (None, [P, c_int]),
    "ggml_backend_cpu_buffer_type": (P, []),
}


def folder() -> Path:
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise PeerAbsentError(f"no llama.cpp: ${FOLDER_VARIABLE} names no folder, llama-cpp-python is not installed")
    return Path(spec.submodule_search_locations[0]) / "lib"


class Ggml:
    """The C functions by their names without "ggml_"."""

    def __init__(self, where: Path) -> None:
        libraries = []
        for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so"):
            if (where / name).exists():
                libraries.append(ctypes.CDLL(os.fspath(where / name), ctypes.RTLD_GLOBAL))
        if not libraries:
            raise PeerAbsentError(f"{where} holds no libggml-base.so")
        for name, (result, arguments) in SIGNATURES.items():
            function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
            if function is None:
                raise PeerAbsentError(f"the libraries in {where} lack {name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: all are set above
        raise AttributeError(name)


class Layer:
    """gate, up and down of all experts, and the graph for the number of tokens prepared last."""

    def __init__(self, ggml: Ggml, format: str, shape: tuple[int, int, int, int], threads: int) -> None:
        self._ggml = ggml
        self._hidden, self._intermediate, self._experts, self._top_k = shape
        self._type, self._values, self._bytes = TYPES[format]
        self._backend = ggml.backend_cpu_init()
        ggml.backend_cpu_set_n_threads(self._backend, threads)
        context = self._context(8)
        hidden, intermediate, experts = self._hidden, self._intermediate, self._experts
        sizes = [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
        self._weights = [ggml.new_tensor_3d(context, self._type, k, rows, experts) for k, rows in sizes]
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, self._buffer_type(format))
        if not buffer:
            raise PeerAbsentError("ggml has no memory for the weights")
        ggml.backend_buffer_set_usage(buffer, WEIGHT_BUFFERS)
        for tensor, (k, rows) in zip(self._weights, sizes, strict=True):
            data = random_blocks(format, experts * rows * k // self._values, self._bytes)
            ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        self._graph: tuple[Any, Any] | None = None

    def _context(self, tensors: int, graph: int = 0) -> Any:
        return self._ggml.init(InitParams(self._ggml.tensor_overhead() * tensors + graph, None, True))

    def _buffer_type(self, format: str) -> Any:
        """For q4_0 the one that repacks for this CPU, where there is one."""
        ggml = self._ggml
        if format == "q4_0":
            registry = ggml.backend_dev_backend_reg(ggml.backend_get_device(self._backend))
            address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
            if address:
                extra = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(ggml.backend_get_device(self._backend))
                for kind in iterate(extra):
                    if b"REPACK" in ggml.backend_buft_name(kind):
                        return kind
        return ggml.backend_cpu_buffer_type()

    def prepare(self, hidden_states: npt.NDArray[Any]) -> None:
        ggml, (tokens, hidden), top_k = self._ggml, hidden_states.shape, self._top_k
        if self._graph is not None:
            ggml.gallocr_free(self._graph[0])
            ggml.free(self._graph[1])
        c = self._context(GRAPH_TENSORS, ggml.graph_overhead())
        x, self._ids = ggml.new_tensor_3d(c, F32, hidden, 1, tokens), ggml.new_tensor_2d(c, I32, top_k, tokens)
        weights = ggml.new_tensor_3d(c, F32, 1, top_k, tokens)
        for tensor in (x, self._ids, weights):
            ggml.set_input(tensor)
        gate, up, down = self._weights
        rows = ggml.swiglu_split(c, ggml.mul_mat_id(c, gate, x, self._ids), ggml.mul_mat_id(c, up, x, self._ids))
        rows = ggml.mul(c, ggml.mul_mat_id(c, down, rows, self._ids), weights)
        row = hidden * ctypes.sizeof(c_float)
        views = [ggml.view_2d(c, rows, hidden, tokens, row * top_k, row * i) for i in range(top_k)]
        output = ggml.cont(c, views[0])
        for view in views[1:]:
            output = ggml.add(c, output, view)
        ggml.set_output(output)
        self._compute, self._output = ggml.new_graph(c), output
        ggml.build_forward_expand(self._compute, output)
        allocator = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        if not ggml.gallocr_alloc_graph(allocator, self._compute):
            raise PeerAbsentError("ggml has no memory for the graph")
        self._graph = (allocator, c)
        self._set(x, hidden_states)
        self._set(weights, np.full((tokens, top_k), 1 / top_k, np.float32))

    def _set(self, tensor: Any, values: npt.NDArray[Any]) -> None:
        self._ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def run(self, topk_ids: npt.NDArray[Any]) -> None:
        self._set(self._ids, topk_ids)
        if self._ggml.backend_graph_compute(self._backend, self._compute) != 0:
            raise PeerAbsentError("ggml could not compute the graph")


def iterate(pointers: Any) -> list[Any]:
    """The entries of an array that ends in NULL."""
    found: list[Any] = []
    while pointers and pointers[len(found)]:
        found.append(pointers[len(found)])
    return found


def random_blocks(format: str, blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Small random weights, their pattern repeated: what they are does not change the time."""
    rng = np.random.default_rng(0)
    pattern = min(blocks, 1 << 16)
    if format in SCALES:
        data = rng.integers(0, 256, (pattern, block_bytes), np.uint8)
        data[:, :2] = np.array([SCALES[format]], np.float16).view(np.uint8)
    else:
        values = rng.standard_normal(pattern, np.float32) * np.float32(0.02)
        words = values.astype(np.float16).view(np.uint16) if format == "f16" else (values.view(np.uint32) >> 16)
        data = words.astype(np.uint16).view(np.uint8).reshape(pattern, block_bytes)
    return np.resize(data.reshape(-1), blocks * block_bytes)


def load(format: str, shape: tuple[int, int, int, int], threads: int) -> Layer:
    return Layer(Ggml(folder()), format, shape, threads)
