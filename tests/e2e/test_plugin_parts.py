"""The plugin's parts inside vLLM's process, without an engine: refusals of layers, names of tensors, the operator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import SHAPES, Shape, layer_tensors
from torch._subclasses.fake_tensor import FakeTensorMode

from syshax.errors import CheckpointError, ConfigError, InternalError
from syshax.vllm import QUANTIZATION, register

pytestmark = pytest.mark.vllm


def layer(**changes: Any) -> SimpleNamespace:
    fields = {"activation": "silu", "apply_router_weight_on_input": False, "hidden_size": 64}
    return SimpleNamespace(**(fields | changes))


def moe(**changes: Any) -> SimpleNamespace:
    none = dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
    flags = {"has_bias": False, "is_lora_enabled": False, "hidden_dim_unpadded": 64, "is_sequence_parallel": False}
    return SimpleNamespace(**(none | flags | {"pcp_size": 1} | changes))


@pytest.mark.parametrize(
    ("layer_changes", "moe_changes", "words"),
    [
        ({"activation": "gelu"}, {}, "activation gelu"),
        ({"activation": SimpleNamespace(value="swigluoai")}, {}, "activation swigluoai"),
        ({"apply_router_weight_on_input": True}, {}, "router weights applied to the experts' input"),
        ({"hidden_size": 128}, {}, "padded hidden size"),
        ({}, {"has_bias": True}, "biases"),
        ({}, {"swiglu_limit": 7.0}, "clamp"),
        ({}, {"is_lora_enabled": True}, "LoRA"),
    ],
)
def test_a_layer_that_the_daemon_would_compute_differently(
    layer_changes: dict[str, Any], moe_changes: dict[str, Any], words: str
) -> None:
    from syshax.vllm.method import check_layer

    check_layer(layer(), moe(), "model.layers.0.mlp.experts")
    with pytest.raises(CheckpointError, match=words):
        check_layer(layer(**layer_changes), moe(**moe_changes), "model.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("parallel", "moe_changes", "words"),
    [
        ({"data_parallel_size": 2}, {}, "--data-parallel-size 2"),
        ({"enable_eplb": True}, {}, "EPLB"),
        ({}, {"pcp_size": 2}, "context parallelism"),
        ({}, {"is_sequence_parallel": True}, "sequence parallelism"),
    ],
)
def test_parallelism_whose_sum_would_be_wrong(
    parallel: dict[str, Any], moe_changes: dict[str, Any], words: str
) -> None:
    from syshax.vllm.method import check_parallel

    def config(**changes: Any) -> Any:
        fields = {"data_parallel_size": 1, "enable_eplb": False}
        return SimpleNamespace(parallel_config=SimpleNamespace(**(fields | changes)))

    check_parallel(config(), moe())
    with pytest.raises(ConfigError, match=words):
        check_parallel(config(**parallel), moe(**moe_changes))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_exactly_the_routed_experts_are_left_out(shape: Shape) -> None:
    from syshax.vllm.loader import is_routed_expert

    for number in range(shape.layers):
        names = [f"model.layers.{number}.{name}" for name, _ in layer_tensors(shape, number)]
        left_out = [name for name in names if is_routed_expert(name)]
        assert len(left_out) == (0 if number in shape.dense_layers else 3 * shape.experts)
        assert all(".experts." in name for name in left_out)
        assert not any("shared_expert" in name for name in left_out)


def test_registering_twice_is_harmless() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    register()
    first = get_quantization_config(QUANTIZATION)
    register()
    assert get_quantization_config(QUANTIZATION) is first
    assert first().get_name() == QUANTIZATION
    with pytest.raises(CheckpointError, match="fp8"):
        first.from_config({"quant_method": "fp8"})


def test_the_operator_has_a_shape_without_a_daemon() -> None:
    from syshax.vllm import op

    with FakeTensorMode():
        x = torch.empty(5, 64, dtype=torch.bfloat16)
        made = op.routed_experts(x, torch.empty(5, 2), torch.empty(5, 2, dtype=torch.int32), 0)
        assert (made.shape, made.dtype) == (x.shape, x.dtype)
    with pytest.raises(InternalError, match="not attached"):
        op.routed_experts(torch.empty(1, 8), torch.empty(1, 2), torch.zeros(1, 2, dtype=torch.int32), 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_experts_are_added_once_whatever_the_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's part through the method's own code, summed as vLLM's runner sums: the experts' output, once."""
    from syshax.vllm import method, op

    class Attached:
        def layer_index(self, prefix: str, **geometry: int) -> int:
            return 0

        def moe(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return 3 * x

    attached = Attached()
    op.bind(attached)
    monkeypatch.setattr(method, "attach", lambda config: attached)
    monkeypatch.setattr(method, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(method, "check_layer", lambda *_: None)
    monkeypatch.setattr(method, "check_parallel", lambda *_: None)
    x = torch.randn(5, 64)
    total = torch.zeros_like(x)
    for rank in range(ranks):
        monkeypatch.setattr(method, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        part = method.SyshaxExpertsMethod(SimpleNamespace(intermediate_size=32), "model.layers.0.mlp.experts")
        owner = torch.nn.Module()
        owner.global_num_experts, owner.top_k = 4, 2
        part.create_weights(owner, 4, 64, 32 // ranks, torch.float32)
        total += part.apply(owner, x, torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int32))
    assert torch.equal(total, 3 * x)


def test_graphs_are_cut_where_vllm_cuts_them_and_around_experts() -> None:
    from vllm.config import CompilationConfig

    from syshax.vllm.launcher import splitting_ops

    ops = splitting_ops()
    assert set(CompilationConfig._attention_ops) < set(ops)
    assert {"vllm::moe_forward", "vllm::moe_forward_shared"} <= set(ops)
    assert all(hasattr(torch.ops.vllm, name.removeprefix("vllm::")) for name in ops[-2:])
