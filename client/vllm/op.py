"""torch.ops.syshax.routed_experts: the one node that the compiled graph has for a layer's routed experts.

Opaque to Dynamo and Inductor, with a fake implementation for shapes. Its body hands over to this process's
attachment, of which there is one, so the layer number alone identifies the work and compiled graphs can be cached
across starts. Works for tensors of any device; which path they take is the attachment's matter.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from syshax.errors import InternalError


class Attachment(Protocol):
    """What the op needs of syshax.vllm.attachment.Attachment."""

    def moe(self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor: ...


# lives as long as the op
_library = torch.library.Library("syshax", "FRAGMENT")  # type: ignore[no-untyped-call]
_attachment: weakref.ref[Attachment] | None = None


def bind(attachment: Attachment) -> None:
    """From now on the op's calls go to this attachment."""
    global _attachment
    _attachment = weakref.ref(attachment)


def routed_experts(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    """x [num_tokens, hidden_size], topk_weights [num_tokens, top_k] float32, topk_ids [num_tokens, top_k] int32,
    layer: index among the MoE layers. Returns a new tensor like x."""
    result: torch.Tensor = torch.ops.syshax.routed_experts(x, topk_weights, topk_ids, layer)
    return result


def _routed_experts(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    attachment = _attachment() if _attachment is not None else None
    if attachment is None:
        raise InternalError("syshax::routed_experts was called in a process that is not attached to syshaxd")
    return attachment.moe(layer, x, topk_ids, topk_weights)


def _shape_only(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(x)


_library.define(  # type: ignore[no-untyped-call]
    "routed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl(  # type: ignore[no-untyped-call]
    "routed_experts", _routed_experts, "CompositeExplicitAutograd"
)
torch.library.register_fake("syshax::routed_experts", _shape_only, lib=_library)
