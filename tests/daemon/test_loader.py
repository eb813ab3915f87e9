"""Checkpoints: what is loaded is what was stored, and whatever cannot be computed correctly is refused by name."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import config_of, experts_of, stored, write_checkpoint, write_safetensors
from fake_core import CoreError, FakeCore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syshax.errors import CancelledError, CheckpointError, NoMemoryError
from syshaxd import loader
from syshaxd.architectures import ARCHITECTURES
from syshaxd.config import ComputeConfig
from syshaxd.loader import Blueprint, LoadProgress, MemoryBudget
from syshaxd.machine import Machine
from syshaxd.planner import Plan, make_plan

NAMES = [row.name for row in ARCHITECTURES]


def plan_for(core: FakeCore) -> Plan:
    return make_plan(core.topology(), ComputeConfig(), Machine.read())


def load(path: Path, core: FakeCore | None = None, cancel: threading.Event | None = None) -> tuple[Any, Blueprint]:
    core = core or FakeCore()
    runtime = core.Runtime([node.as_core_plan() for node in plan_for(core).nodes], "", 0, "off", 1)
    blueprint = loader.sized(core, runtime, plan_for(core), loader.inspect(path, "bf16"))
    progress = LoadProgress()
    progress.layers_total = blueprint.geometry.num_layers
    return loader.load(core, runtime, blueprint, "m", progress, cancel or threading.Event()), blueprint


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize(("dtype", "shards", "padding"), [("BF16", 1, 0), ("F16", 3, 0), ("F32", 2, 1), ("BF16", 1, 3)])
def test_every_expert_arrives_as_stored(
    tmp_path: Path, architecture: str, dtype: str, shards: int, padding: int
) -> None:
    tensors = write_checkpoint(tmp_path, architecture, dtype, shards, padding)
    model, blueprint = load(tmp_path)
    assert model.sealed and blueprint.architecture.name == architecture
    for index, layer in enumerate(blueprint.geometry.layer_ids):
        for expert in range(4):
            for projection, name in enumerate(blueprint.architecture.tensor_names(layer, expert)):
                np.testing.assert_array_equal(model.layers[index][projection][expert], tensors[f"{name}.weight"])


def test_layers_without_experts_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=7, decoder_sparse_step=2, mlp_only_layers=[3])
    model, blueprint = load(tmp_path)
    assert blueprint.geometry.layer_ids == [1, 5] and len(model.layers) == 2


def test_savers_differ_in_the_name_of_the_number_of_experts(tmp_path: Path) -> None:
    config = config_of("Qwen3MoeForCausalLM", num_experts=None, num_local_experts=4)
    write_checkpoint(tmp_path, num_experts=None, num_local_experts=4)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert loader.inspect(tmp_path, "bf16").geometry.num_experts == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*'fp8'"),
        ({"apply_router_weight_on_input": True}, "router weights on the experts' input"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": 5}, r"experts\.4\.gate_proj\.weight and 5 more of 30 is missing"),
        ({"num_experts": 3}, r"experts\.3\..* has no place"),
        ({"hidden_size": 32}, r"has the shape \[96, 64\], config.json says \[96, 32\]"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({"num_hidden_layers": 3}, r"layers\.2\."),
        ({"num_hidden_layers": 1}, r"layers\.1\..* has no place"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": [0, 1]}, "none of the 2 layers is a MoE layer"),
        ({"mlp_only_layers": [9]}, r"mlp_only_layers is \[9\]"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_checkpoint(tmp_path)
    config = {key: value for key, value in (config_of("Qwen3MoeForCausalLM") | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words) as caught:
        loader.inspect(tmp_path, "bf16")
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize(
    ("extra", "dtype", "words"),
    [
        ("{gate}.bias", "BF16", "expert biases are not supported"),
        ("{gate}.weight_scale_inv", "F32", "has no place"),
        ("{gate}.weight", "U8", "dtype U8, which is not supported"),
        ("{gate}.weight", "F32", "differ in dtype"),
    ],
)
def test_tensors_that_would_be_left_out_or_misread(
    tmp_path: Path, architecture: str, extra: str, dtype: str, words: str
) -> None:
    write_checkpoint(tmp_path, architecture)
    config = config_of(architecture)
    tensors = {name: ("BF16", stored(values, "BF16")) for name, values in experts_of(config).items()}
    gate = next(iter(tensors)).removesuffix(".weight")
    values = np.zeros((96, 64), np.float32)
    tensors[extra.format(gate=gate)] = (dtype, stored(values, dtype))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=words):
        loader.inspect(tmp_path, "bf16")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(list(config_of("Qwen3MoeForCausalLM"))),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
        st.lists,
        max_leaves=3,
    ),
)
def test_any_config_loads_or_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    if not (tmp_path / "model.safetensors").exists():
        write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of("Qwen3MoeForCausalLM") | {key: value}))
    try:
        geometry = loader.inspect(tmp_path, "bf16").geometry
    except CheckpointError:
        return
    assert (geometry.num_layers, geometry.num_experts, geometry.hidden_size) == (2, 4, 64)


def test_a_file_that_changes_between_check_and_load_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    core = FakeCore()
    runtime = core.Runtime([node.as_core_plan() for node in plan_for(core).nodes], "", 0, "off", 1)
    blueprint = loader.inspect(tmp_path, "bf16")
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed"):
        loader.load(core, runtime, blueprint, "m", LoadProgress(), threading.Event())
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: No such file"):
        loader.load(core, runtime, blueprint, "m", LoadProgress(), threading.Event())
    assert not runtime.models


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    core = FakeCore()
    core.files_cut_short = True
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed"):
        load(tmp_path, core)
    assert not core.runtime.models, "the pool is given back"


@pytest.mark.parametrize("error", [CoreError("no_memory", "no pages left", "less"), RuntimeError("boom")])
def test_a_failing_conversion_gives_the_pool_back(tmp_path: Path, error: Exception) -> None:
    write_checkpoint(tmp_path)
    core = FakeCore()
    core.load_error = error
    with pytest.raises(NoMemoryError if isinstance(error, CoreError) else RuntimeError):
        load(tmp_path, core)
    assert not core.runtime.models


def test_cancel_comes_between_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    core, cancel = FakeCore(), threading.Event()
    cancel.set()
    with pytest.raises(CancelledError, match="after 0 of 2 layers"):
        load(tmp_path, core, cancel)
    assert not core.runtime.models


@pytest.mark.parametrize(
    ("free", "budget", "words"),
    [
        (1 << 33, MemoryBudget(250_000, 0, 0), r"needs 288 KiB; memory.limit is 244 KiB, of which 0 B are in use"),
        (1 << 33, MemoryBudget(500_000, 0, 300_000), r"of which 293 KiB are in use"),
        (290_000, MemoryBudget(0, 0, 0), r"288 KiB of it on node 0, which has 283 KiB free"),
        (400_000, MemoryBudget(0, 200_000, 0), r"less 195 KiB of memory.reserve"),
    ],
)
def test_too_little_memory_is_refused_with_the_numbers(
    tmp_path: Path, free: int, budget: MemoryBudget, words: str
) -> None:
    write_checkpoint(tmp_path)
    core = FakeCore()
    core.free_bytes = free
    plan = plan_for(core)
    runtime = core.Runtime([node.as_core_plan() for node in plan.nodes], "", 0, "off", 1)
    blueprint = loader.sized(core, runtime, plan, loader.inspect(tmp_path, "bf16"))
    with pytest.raises(NoMemoryError, match=words):
        loader.check_memory(core, plan, blueprint, budget)
    core.free_bytes = 1 << 33
    loader.check_memory(core, plan, blueprint, MemoryBudget(300_000, 1000, 0))


def test_the_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    core = FakeCore()
    plan = plan_for(core)
    runtime = core.Runtime([node.as_core_plan() for node in plan.nodes], "", 0, "off", 1)
    blueprint = loader.sized(core, runtime, plan, loader.inspect(tmp_path, "bf16"))
    monkeypatch.setattr(loader, "memory_group_limit", lambda: (1 << 20, 900_000))
    with pytest.raises(NoMemoryError, match=r"the control group may use 1 MiB, 879 KiB of it in use"):
        loader.check_memory(core, plan, blueprint, MemoryBudget(0, 0, 0))
    monkeypatch.setattr(loader, "memory_group_limit", lambda: (2 << 20, 900_000))
    loader.check_memory(core, plan, blueprint, MemoryBudget(0, 0, 0))
    with pytest.raises(NoMemoryError, match=r"memory\.reserve leaves 977 KiB to sessions"):
        loader.check_memory(core, plan, blueprint, MemoryBudget(0, 1_000_000, 0))
