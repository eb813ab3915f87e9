"""Small random checkpoints for tests, written tensor by tensor in the layout that Hugging Face publishes.

Owns what a test needs of a model: every expert differs (wrong routing shows), every weight is a bfloat16 number (so
float32 and bfloat16 copies of a checkpoint compute the same thing), router logits lie well apart (so that float32
reference and float32 server choose the same experts), and the tokenizer is made on the spot: one token a byte.
Written here rather than through transformers' model classes so that these tests do not depend on how one release of
it names tensors; transformers is the reference they are compared with.

    python tests/models.py qwen3_moe OUT_DIR
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 259  # the bytes and three special tokens
END, PAD = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one checkpoint; `kind` is a key of KINDS."""

    kind: str
    layers: int = 3
    hidden: int = 256
    intermediate: int = 128
    experts: int = 8
    top_k: int = 2
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    dense_layers: tuple[int, ...] = ()
    """Layers with a plain MLP instead of experts (Qwen only)."""
    seed: int = 1


MIXTRAL = Shape("mixtral")
QWEN2_MOE = Shape("qwen2_moe")
QWEN3_MOE = Shape("qwen3_moe", layers=4, dense_layers=(1,))
QWEN3_30B_A3B = Shape("qwen3_moe", 2, 2048, 768, 128, 8, heads=32, kv_heads=4, head_dim=128)
SHAPES = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE, "qwen3_30b_a3b": QWEN3_30B_A3B}


def _common_config(s: Shape) -> dict[str, Any]:
    return {
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "num_experts_per_tok": s.top_k,
    }


def _mixtral_config(s: Shape) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": s.intermediate,
        "num_local_experts": s.experts,
        "sliding_window": None,
    }


def _qwen_config(s: Shape, name: str) -> dict[str, Any]:
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": s.kind,
        "intermediate_size": 2 * s.hidden,
        "moe_intermediate_size": s.intermediate,
        "num_experts": s.experts,
        "norm_topk_prob": s.kind == "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(s.dense_layers),
    }


def config(s: Shape) -> dict[str, Any]:
    """The contents of config.json."""
    if s.kind == "mixtral":
        return _mixtral_config(s) | _common_config(s)
    if s.kind == "qwen2_moe":
        return _qwen_config(s, "Qwen2Moe") | {"shared_expert_intermediate_size": 2 * s.intermediate} | _common_config(s)
    return _qwen_config(s, "Qwen3Moe") | _common_config(s)


def _attention(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield "self_attn.q_proj.weight", (q, s.hidden)
    yield "self_attn.k_proj.weight", (kv, s.hidden)
    yield "self_attn.v_proj.weight", (kv, s.hidden)
    yield "self_attn.o_proj.weight", (s.hidden, q)
    if s.kind == "qwen2_moe":
        yield "self_attn.q_proj.bias", (q,)
        yield "self_attn.k_proj.bias", (kv,)
        yield "self_attn.v_proj.bias", (kv,)
    if s.kind == "qwen3_moe":
        yield "self_attn.q_norm.weight", (s.head_dim,)
        yield "self_attn.k_norm.weight", (s.head_dim,)
    yield "input_layernorm.weight", (s.hidden,)
    yield "post_attention_layernorm.weight", (s.hidden,)


def _mlp(prefix: str, names: tuple[str, str, str], s: Shape, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    gate, up, down = names
    yield f"{prefix}.{gate}.weight", (width, s.hidden)
    yield f"{prefix}.{up}.weight", (width, s.hidden)
    yield f"{prefix}.{down}.weight", (s.hidden, width)


def layer_tensors(s: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names within the layer and shapes."""
    yield from _attention(s)
    qwen = ("gate_proj", "up_proj", "down_proj")
    if layer in s.dense_layers:
        yield from _mlp("mlp", qwen, s, 2 * s.hidden)
        return
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if s.kind == "mixtral" else ("mlp", qwen)
    yield f"{block}.gate.weight", (s.experts, s.hidden)
    for expert in range(s.experts):
        yield from _mlp(f"{block}.experts.{expert}", names, s, s.intermediate)
    if s.kind == "qwen2_moe":
        yield from _mlp("mlp.shared_expert", qwen, s, 2 * s.intermediate)
        yield "mlp.shared_expert_gate.weight", (1, s.hidden)


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A bfloat16 tensor whose spread suits its place: norms near 1, routers and the head wide."""
    value = torch.empty(shape).normal_(generator=generator)
    if "norm" in name:
        value = 1.0 + 0.05 * value
    elif name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
        value *= 8.0 / math.sqrt(shape[-1])
    elif name.startswith("lm_head"):
        value *= 5.0 / math.sqrt(shape[-1])
    elif name.endswith("bias"):
        value *= 0.1
    else:
        value *= 1.3 / math.sqrt(shape[-1])
    return value.to(torch.bfloat16)


def write_tokenizer(out: Path) -> None:
    """One token for each byte, three special tokens, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, "<|im_start|>", END)])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, "do_sample": False}))


def write_checkpoint(s: Shape, out: Path) -> Path:
    """Writes a sharded checkpoint (a file for each layer, one for the rest) with its index; returns `out`."""
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(s.seed)
    shards = s.layers + 1
    weight_map: dict[str, str] = {}

    def write(number: int, tensors: Iterator[tuple[str, tuple[int, ...]]], prefix: str) -> None:
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        made = {prefix + key: random_tensor(key, shape, generator) for key, shape in tensors}
        save_file(made, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(made, name))

    for layer in range(s.layers):
        write(layer + 1, layer_tensors(s, layer), f"model.layers.{layer}.")
    rest = {"model.embed_tokens.weight": (VOCAB, s.hidden), "model.norm.weight": (s.hidden,)}
    write(shards, iter((rest | {"lm_head.weight": (VOCAB, s.hidden)}).items()), "")
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config(s), indent=1))
    write_tokenizer(out)
    return out


if __name__ == "__main__":
    write_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2]))
