"""vLLM's own CPU operator for fused experts, cpu_fused_moe, with the vector instructions of this CPU."""

from __future__ import annotations

from typing import Any

from syshaxd.bench.peers.torch_layer import TorchLayer, import_torch, load_vllm_operators, operator, random_bf16

ISA = "vec"


def load(format: str, shape: tuple[int, int, int, int], threads: int) -> TorchLayer:
    hidden, intermediate, experts, top_k = shape
    torch = import_torch(threads)
    operators = load_vllm_operators(torch)
    prepack, fused = operator(operators, "prepack_moe_weight"), operator(operators, "cpu_fused_moe")
    packed = []
    for sizes in ((experts, 2 * intermediate, hidden), (experts, hidden, intermediate)):
        weight = random_bf16(torch, *sizes)
        packed.append(torch.empty_like(weight))
        prepack(weight, packed[-1], ISA)
    w13, w2 = packed

    def run_layer(output: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> None:
        fused(output, hidden_states, w13, w2, None, None, topk_weights, topk_ids, False, "silu", ISA)

    return TorchLayer(torch, top_k, run_layer)
