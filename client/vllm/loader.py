"""`--load-format syshax`: vLLM's default loader without the routed experts, which are never read.

Tensors of experts are left out three times, from cheap to sure: shards that hold nothing else are not opened, tensors
whose expert number says so are not fetched, and whatever still comes is dropped before the model sees it.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Generator

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from syshax.errors import ConfigError
from syshax.vllm import QUANTIZATION

ROUTED_EXPERT = re.compile(r"\.experts\.(\d+\.|gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)")


def is_routed_expert(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to a routed expert (and not to a shared one or the router)."""
    return ROUTED_EXPERT.search(name) is not None


class SyshaxModelLoader(DefaultModelLoader):  # type: ignore[misc]
    def __init__(self, load_config: LoadConfig) -> None:
        load_config = copy.copy(load_config)
        load_config.load_format = "auto"  # the parent looks the file format up by this name
        super().__init__(load_config)
        self.local_expert_ids: set[int] | None = set()  # "this rank holds no expert": the parent skips them unread

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        if model_config.quantization != QUANTIZATION:
            raise ConfigError(
                f"--load-format {QUANTIZATION} leaves the experts' weights out, and without --quantization "
                f"{QUANTIZATION} nothing would compute them",
                f"give both, or run syshax-worker {model_config.model}",
            )
        if not hasattr(model, "is_unused_checkpoint_weight"):
            model.is_unused_checkpoint_weight = is_routed_expert  # type: ignore[assignment]
        super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        for name, tensor in super().get_all_weights(model_config, model):
            if not is_routed_expert(name):
                yield name, tensor


@functools.cache
def register() -> None:
    register_model_loader(QUANTIZATION)(SyshaxModelLoader)
