"""Other projects' routed experts on the same machine, for comparison in one run.

Owns the table of peers and the one interface that they have in common. Each peer is a module that is imported in a
process of its own (`python -m syshaxd.bench.peers`): what it needs may be absent, and what it does to its process
(thread pools, affinity, instructions that this CPU lacks) stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt


class PeerAbsentError(Exception):
    """This peer, or this format of it, cannot run here; the message says why."""


class PeerLayer(Protocol):
    """One loaded layer with random weights: hidden_size x intermediate_size, experts, top_k."""

    def prepare(self, hidden_states: npt.NDArray[Any]) -> None:
        """[tokens, hidden_size] float32, for the calls that follow."""

    def run(self, topk_ids: npt.NDArray[Any]) -> None:
        """Computes the layer once; topk_ids [tokens, top_k] int32, all weights 1 / top_k."""


@dataclass(frozen=True)
class PeerFormat:
    """How a peer stores weights: the width that it is compared in (16, 8 or 4 bits) and its bytes for each weight."""

    width: int
    bytes_per_weight: float


@dataclass(frozen=True)
class Peer:
    """One row of the table. `module`.load(format, shape, threads) gives a PeerLayer or raises PeerAbsentError."""

    title: str
    module: str
    formats: Mapping[str, PeerFormat]
    environment: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    "llama.cpp": Peer(
        "llama.cpp, mul_mat_id",
        "ggml",
        {
            "bf16": PeerFormat(16, 2.0),
            "f16": PeerFormat(16, 2.0),
            "q8_0": PeerFormat(8, 34 / 32),
            "q4_0": PeerFormat(4, 18 / 32),
        },
    ),
    "vllm": Peer("vLLM, cpu_fused_moe", "vllm_fused", {"bf16": PeerFormat(16, 2.0)}),
    "sglang": Peer(
        "SGLang's fused_experts_cpu in vLLM's CPU build",
        "sglang",
        {
            "bf16": PeerFormat(16, 2.0),
            "int8_row": PeerFormat(8, 1.0),
            "int4_g128": PeerFormat(4, 0.5 + 2 / 128),
        },
    ),
    "zentorch": Peer(
        "zentorch, fused_moe",
        "zentorch_fused",
        {
            "bf16": PeerFormat(16, 2.0),
            "int8_row": PeerFormat(8, 1.0),
            "int4_g128": PeerFormat(4, 0.5 + 2 / 128),
        },
    ),
    "kt-kernel": Peer(
        "kt-kernel",
        "ktransformers",
        {"bf16": PeerFormat(16, 2.0), "int8_row": PeerFormat(8, 1.0), "int4_g32": PeerFormat(4, 0.5 + 2 / 32)},
    ),
}
WIDTH_OF_FORMAT = {"bf16": 16, "fp16": 16, "q8_0": 8, "q4_0": 4, "int8row": 8}
"""Our formats' widths: a point is compared with peers of the same."""
