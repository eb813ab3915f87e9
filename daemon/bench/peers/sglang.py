"""SGLang's fused_experts_cpu as vLLM's CPU build carries it (AVX-512 and AMX only)."""

from __future__ import annotations

from typing import Any

from syshaxd.bench.peers.torch_layer import (
    TorchLayer,
    import_torch,
    load_vllm_operators,
    operator,
    random_bf16,
    random_int8,
)

BF16, INT8, INT4 = 0, 1, 3
"""The operator's numbers for how weights are stored."""
GROUP = 128
ZERO_POINTS = 0x77777777


def packed_int4(torch: Any, pack: Any, experts: int, rows: int, columns: int) -> tuple[Any, Any, Any]:
    """(weights, zero points, scales) from random GPTQ-like weights."""
    words = torch.randint(-(2**31), 2**31 - 1, (experts, columns // 8, rows), dtype=torch.int32)
    scales = torch.full((experts, columns // GROUP, rows), 0.002, dtype=torch.bfloat16)
    zeros = torch.full((experts, columns // GROUP, rows // 8), ZERO_POINTS, dtype=torch.int32)
    weights, zeros, scales = pack(words, zeros, scales, 1)
    return weights, zeros, scales


def load(format: str, shape: tuple[int, int, int, int], threads: int) -> TorchLayer:
    hidden, intermediate, experts, top_k = shape
    torch = import_torch(threads)
    operators = load_vllm_operators(torch)
    fused = operator(operators, "fused_experts_cpu")
    sizes = ((experts, 2 * intermediate, hidden), (experts, hidden, intermediate))
    if format == "int4_g128":
        pack = operator(operators, "convert_weight_packed_scale_zp")
        (w13, z13, s13), (w2, z2, s2) = (packed_int4(torch, pack, *one) for one in sizes)
        quantization = (INT4, s13, s2, z13, z2)
    else:
        pack, make = operator(operators, "convert_weight_packed"), random_bf16 if format == "bf16" else random_int8
        w13, w2 = (pack(make(torch, *one)) for one in sizes)
        s13, s2 = (torch.full(one[:2], 0.0003) for one in sizes)
        quantization = (BF16, None, None, None, None) if format == "bf16" else (INT8, s13, s2, None, None)

    def run_layer(output: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> None:
        rest = (None, None, None, None, None, None, True)
        fused(output, hidden_states, w13, w2, topk_weights, topk_ids, *quantization, *rest)

    return TorchLayer(torch, top_k, run_layer)
