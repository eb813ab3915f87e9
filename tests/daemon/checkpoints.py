"""Tiny Mixture-of-Experts checkpoints, written byte by byte: only the routed experts, all of them different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

STEMS = {
    "MixtralForCausalLM": ("model.layers.{}.block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "Qwen2MoeForCausalLM": ("model.layers.{}.mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
    "Qwen3MoeForCausalLM": ("model.layers.{}.mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
}
MODEL_TYPES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json; a change to None takes the key out."""
    mixtral = architecture == "MixtralForCausalLM"
    config = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "intermediate_size" if mixtral else "moe_intermediate_size": 96,
        "num_local_experts" if mixtral else "num_experts": 4,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as safetensors' dtype; values must be exact in bfloat16 for a lossless trip."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"F16": np.float16, "F32": np.float32, "F64": np.float64, "U8": np.uint8}[dtype])


def experts_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every routed expert's tensors as float32 values that bfloat16 and float16 hold exactly."""
    random = np.random.default_rng(seed)
    stem, projections = STEMS[config["architectures"][0]]
    experts = config.get("num_local_experts", config.get("num_experts"))
    inner = config.get("moe_intermediate_size", config.get("intermediate_size"))
    wide = (inner, config["hidden_size"])
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        if layer in config.get("mlp_only_layers", []) or (layer + 1) % config.get("decoder_sparse_step", 1):
            continue
        for expert in range(experts):
            for name, shape in zip(projections, (wide, wide, wide[::-1]), strict=True):
                values = random.integers(-16, 17, shape).astype(np.float32) / 64
                tensors[f"{stem.format(layer, expert)}{name}.weight"] = values
    return tensors


def write_safetensors(file: Path, tensors: dict[str, tuple[str, np.ndarray]], padding: int = 0) -> None:
    """One file; `padding` spaces after the header shift the data (unaligned for odd numbers)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def write_checkpoint(
    path: Path,
    architecture: str = "Qwen3MoeForCausalLM",
    dtype: str = "BF16",
    shards: int = 1,
    padding: int = 0,
    seed: int = 0,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """A directory that the loader takes; gives the experts as float32."""
    config = config_of(architecture, **changes)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = experts_of(config, seed)
    entries = {name: (dtype, stored(values, dtype)) for name, values in tensors.items()}
    if shards == 1:
        write_safetensors(path / "model.safetensors", entries, padding)
        return tensors
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(entries.items())[shard::shards])
        write_safetensors(path / file, part, padding)
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors
