"""AMD's zentorch: zentorch_fused_moe."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from syshaxd.bench.peers import PeerAbsentError
from syshaxd.bench.peers.torch_layer import TorchLayer, import_torch, operator, random_bf16, random_int8

GROUP = 128


def load(format: str, shape: tuple[int, int, int, int], threads: int) -> TorchLayer:
    hidden, intermediate, experts, top_k = shape
    if importlib.util.find_spec("zentorch") is None:
        raise PeerAbsentError("zentorch is not installed")
    torch = import_torch(threads)
    importlib.import_module("zentorch")
    operators = torch.ops.zentorch
    fused = operator(operators, "zentorch_fused_moe")
    sizes = ((experts, 2 * intermediate, hidden), (experts, hidden, intermediate))
    s13 = s2 = None
    if format == "bf16":
        w13, w2 = (random_bf16(torch, *one) for one in sizes)
    elif format == "int8_row":
        w13, w2 = (random_int8(torch, *one) for one in sizes)
        s13, s2 = (torch.full(one[:2], 0.0003) for one in sizes)
    else:
        repack = operator(operators, "zentorch_woq_repack_weight")
        w13, w2 = (
            torch.stack([repack(weight) for weight in torch.randint(-8, 8, one, dtype=torch.int8)]) for one in sizes
        )
        s13, s2 = (torch.full((one[0], one[2] // GROUP, one[1]), 0.002, dtype=torch.bfloat16) for one in sizes)

    def run_layer(output: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any) -> None:
        fused(output, hidden_states, w13, w2, None, None, topk_weights, topk_ids, False, "silu", s13, s2)

    return TorchLayer(torch, top_k, run_layer)
