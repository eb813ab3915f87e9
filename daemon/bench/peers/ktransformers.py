"""kt-kernel's MoE classes (KTransformers), driven through its extension module."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy.typing as npt

from syshaxd import _core
from syshaxd.bench.peers import PeerAbsentError
from syshaxd.bench.peers.torch_layer import import_torch, random_bf16

MAX_TOKENS = 1024
GROUP = 32
CLASSES = {
    "bf16": ("AMXBF16_MOE", "AVX2BF16_MOE"),
    "int8_row": ("AMXInt8_MOE", ""),
    "int4_g32": ("AMXInt4_KGroup_MOE", ""),
}
"""On CPUs with AVX-512 (the name says AMX) and without."""


class Layer:
    """Weights, the pool of threads and buffers; everything that the extension points at is kept here."""

    def __init__(self, torch: Any, extension: Any, format: str, shape: tuple[int, int, int, int], threads: int) -> None:
        self._torch, (hidden, intermediate, experts, self._top_k) = torch, shape
        name = CLASSES[format]["avx512" not in _core.cpu_features()]
        if not name or not hasattr(extension.moe, name):
            raise PeerAbsentError(f"kt-kernel has no {format} for this CPU")
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self._cpu = extension.CPUInfer(pool)
        mask = torch.zeros(experts, dtype=torch.bool)
        config = extension.moe.MOEConfig(experts, self._top_k, hidden, intermediate, mask.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self._cpu.backend_, MAX_TOKENS
        self._kept: list[Any] = [mask, config]
        sizes = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
        self._weights(config, format, experts, sizes)
        self._moe = getattr(extension.moe, name)(config)
        order = torch.arange(experts, dtype=torch.int64)
        self._do(self._moe.load_weights_task(order.data_ptr()))

    def _do(self, task: Any) -> None:
        self._cpu.submit(task)
        self._cpu.sync()

    def _keep(self, tensor: Any) -> Any:
        self._kept.append(tensor)
        return tensor

    def _weights(self, config: Any, format: str, experts: int, sizes: list[tuple[int, int]]) -> None:
        torch = self._torch
        scales: list[Any] = []
        if format == "int4_g32":
            tensors = [
                self._keep(torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8)) for rows, k in sizes
            ]
            scales = [
                self._keep(torch.full((experts, rows, k // GROUP), 0.0078125, dtype=torch.bfloat16))
                for rows, k in sizes
            ]
            config.quant_config.bits, config.quant_config.group_size = 4, GROUP
            config.quant_config.zero_point = False
        else:
            tensors = [self._keep(random_bf16(torch, experts, rows, k)) for rows, k in sizes]
        if format == "int8_row":
            config.gate_proj, config.up_proj, config.down_proj = (tensor.data_ptr() for tensor in tensors)
            config.save = config.load = False
            return

        def pointers(tensor: Any) -> list[list[int]]:
            return [[expert.data_ptr() for expert in tensor]]

        config.gate_projs, config.up_projs, config.down_projs = map(pointers, tensors)
        config.gate_scales, config.up_scales, config.down_scales = (
            map(pointers, scales) if scales else [[[0] * experts]] * 3
        )

    def prepare(self, hidden_states: npt.NDArray[Any]) -> None:
        torch, tokens = self._torch, len(hidden_states)
        self._input = torch.from_numpy(hidden_states).to(torch.bfloat16)
        self._output = torch.empty_like(self._input)
        self._topk_weights = torch.full((tokens, self._top_k), 1 / self._top_k)
        self._count = torch.tensor([tokens], dtype=torch.int32)

    def run(self, topk_ids: npt.NDArray[Any]) -> None:
        ids = self._torch.from_numpy(topk_ids).to(self._torch.int64)
        buffers = (self._topk_weights, self._input, self._output)
        pointers = [ids.data_ptr(), *(buffer.data_ptr() for buffer in buffers)]
        self._do(self._moe.forward_task(self._count.data_ptr(), self._top_k, *pointers, False))


def load(format: str, shape: tuple[int, int, int, int], threads: int) -> Layer:
    if importlib.util.find_spec("kt_kernel") is None:
        raise PeerAbsentError("kt-kernel is not installed")
    torch = import_torch(threads)
    extension = importlib.import_module("kt_kernel").kt_kernel_ext
    return Layer(torch, extension, format, shape, threads)
