"""The one table of architectures: where each keeps its experts' geometry and what it calls their tensors.

Owns what differs between checkpoints of supported models. Adding an architecture is adding a row here; all checks and
the loading itself are loader.py's and know no names. Sources: the models' configuration classes and weight names as
published with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from syshax.errors import CheckpointError


def every_layer(config: Mapping[str, Any], layer: int) -> bool:
    """All decoder layers are MoE layers."""
    return True


def sparse_step(config: Mapping[str, Any], layer: int) -> bool:
    """Qwen's rule: every decoder_sparse_step-th layer, less those in mlp_only_layers."""
    return (
        layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


@dataclass(frozen=True)
class Architecture:
    """One row. `tensor` gives the name of a layer's expert's projection; *_key are keys of config.json
    (experts_keys: the first that is there; savers differ)."""

    name: str
    model_type: str
    experts_keys: tuple[str, ...]
    intermediate_key: str
    is_moe_layer: Callable[[Mapping[str, Any], int], bool]
    tensor: str
    gate: str
    up: str
    down: str
    hidden_key: str = "hidden_size"
    layers_key: str = "num_hidden_layers"
    top_k_key: str = "num_experts_per_tok"
    activation_key: str = "hidden_act"

    def tensor_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Names of (gate_proj, up_proj, down_proj); add ".weight" or ".bias"."""
        gate, up, down = (
            self.tensor.format(layer=layer, expert=expert, projection=projection)
            for projection in (self.gate, self.up, self.down)
        )
        return gate, up, down


_QWEN_TENSOR = "model.layers.{layer}.mlp.experts.{expert}.{projection}"

ARCHITECTURES = (
    Architecture(
        name="MixtralForCausalLM",
        model_type="mixtral",
        experts_keys=("num_local_experts",),
        intermediate_key="intermediate_size",
        is_moe_layer=every_layer,
        tensor="model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}",
        gate="w1",
        up="w3",
        down="w2",
    ),
    Architecture(
        name="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        experts_keys=("num_experts", "num_local_experts"),
        intermediate_key="moe_intermediate_size",
        is_moe_layer=sparse_step,
        tensor=_QWEN_TENSOR,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        experts_keys=("num_experts", "num_local_experts"),
        intermediate_key="moe_intermediate_size",
        is_moe_layer=sparse_step,
        tensor=_QWEN_TENSOR,
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
    ),
)


def find_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """The row for a config.json. Raises CheckpointError naming what it is and what there is."""
    names, model_type = config.get("architectures"), config.get("model_type")
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for row in ARCHITECTURES:
        if row.name in listed or (not listed and row.model_type == model_type):
            return row
    known = ", ".join(row.name for row in ARCHITECTURES)
    seen = ", ".join(listed) or f"model_type {model_type!r}"
    raise CheckpointError(f"{where}: the architecture {seen} is not supported", f"supported: {known}")
