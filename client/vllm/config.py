"""`--quantization syshax`: which layers of a model syshax takes over.

vLLM calls it quantization because that is the hook by which a layer's weights and arithmetic are replaced; here
routed experts get a method that asks the daemon, every other layer stays unquantized and vLLM's own. The class lives
at module level because VllmConfig, which holds an instance, is pickled to other processes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from syshax.errors import CheckpointError
from syshax.vllm import QUANTIZATION


class SyshaxConfig(QuantizationConfig):  # type: ignore[misc]
    """No settings of its own: those come by --additional-config and the environment (see settings)."""

    def get_name(self) -> str:
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SyshaxConfig:
        """Called only for a checkpoint that is quantized itself; no such one is supported yet."""
        raise CheckpointError(
            f"the checkpoint is quantized already (quant_method {config.get('quant_method')!r} in its config.json)",
            "syshax takes bf16, fp16 and fp32 checkpoints and converts the experts itself: --format q8_0 or q4_0",
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return QUANTIZATION if user_quant == QUANTIZATION else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from syshax.vllm.method import SyshaxExpertsMethod

        if isinstance(layer, RoutedExperts):
            return SyshaxExpertsMethod(layer.moe_config, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


@functools.cache
def register() -> None:
    register_quantization_config(QUANTIZATION)(SyshaxConfig)
