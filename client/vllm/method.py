"""What a layer of routed experts does under syshax: checks at construction, nothing held, one op in the forward pass.

vLLM's runner has chosen the experts before `apply` and adds shared experts, scaling and the sum over ranks after it.
So `apply` is the experts and their weighted sum alone, the whole of which the daemon computes for tensor-parallel
rank 0; the other ranks contribute zeros to the sum, which the runner makes over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase, RoutedExperts

from syshax.errors import CheckpointError, ConfigError
from syshax.vllm import op
from syshax.vllm.attachment import Attachment, attach


def swallow(
    param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, return_success: bool = False, **kwargs: Any
) -> bool | None:
    """weight_loader of the placeholders: takes any tensor and keeps none."""
    return True if return_success else None


def check_layer(layer: RoutedExperts, moe: FusedMoEConfig, prefix: str) -> None:
    """Raises CheckpointError for what the daemon would compute differently from vLLM."""
    activation = getattr(layer.activation, "value", str(layer.activation))
    refusals = {
        f"activation {activation} (only silu)": activation != "silu",
        "biases in the experts": moe.has_bias,
        "router weights applied to the experts' input": layer.apply_router_weight_on_input,
        "a clamp in the activation": any(
            value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)
        ),
        f"a padded hidden size ({layer.hidden_size})": layer.hidden_size != moe.hidden_dim_unpadded,
        "LoRA": moe.is_lora_enabled,
    }
    wrong = [what for what, is_so in refusals.items() if is_so]
    if wrong:
        raise CheckpointError(
            f"{prefix}: syshax does not compute {', '.join(wrong)}", "serve this model without syshax"
        )


def check_parallel(config: VllmConfig, moe: FusedMoEConfig) -> None:
    """Raises ConfigError where the ranks' sum would not be the one that rank 0 alone contributes to."""
    parallel = config.parallel_config
    refusals = {
        f"--data-parallel-size {parallel.data_parallel_size}": parallel.data_parallel_size > 1,
        f"prefill context parallelism ({moe.pcp_size})": moe.pcp_size > 1,
        "sequence parallelism of the experts": moe.is_sequence_parallel,
        "redundant experts (EPLB)": parallel.enable_eplb,
    }
    wrong = [what for what, is_so in refusals.items() if is_so]
    if wrong:
        raise ConfigError(
            f"syshax does not run with {', '.join(wrong)}",
            "start several workers instead: the daemon holds the weights once for all of them",
        )


class SyshaxExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The method of one layer, `prefix` its name in vLLM (model.layers.3.mlp.experts)."""

    requires_device_loading = False

    def __init__(self, moe: FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        self.prefix = prefix
        self.layer_index = -1
        self.attachment: Attachment | None = None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Placeholders of no bytes, into which any loader can "load"; and, before anything is read from disk, the
        attachment: a worker that cannot delegate must not come up."""
        for name in ("w13_weight", "w2_weight"):
            placeholder = torch.nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
            placeholder.weight_loader = swallow  # type: ignore[attr-defined]
            layer.register_parameter(name, placeholder)
        config = get_current_vllm_config()
        check_layer(layer, self.moe, self.prefix)
        check_parallel(config, self.moe)
        if get_tensor_model_parallel_rank() != 0:
            return
        self.attachment = attach(config)
        self.layer_index = self.attachment.layer_index(
            self.prefix,
            num_experts=layer.global_num_experts,
            hidden_size=hidden_size,
            intermediate_size=self.moe.intermediate_size,
            top_k=layer.top_k,
        )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size], topk_weights and topk_ids [num_tokens, top_k] -> like x."""
        if self.layer_index < 0:
            return torch.zeros_like(x)
        return op.routed_experts(x, topk_weights, topk_ids, self.layer_index)
