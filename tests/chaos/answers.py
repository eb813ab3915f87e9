"""What the chaos run asks for and what it must get: rows of input, the slow reference's answers, their error bounds.

A request is a list of rows of one table, in any number and order, so that every request is another one while the
reference is computed once. Inputs are numbers that float32, float16 and bfloat16 all hold exactly.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TABLES_VARIABLE = "SYSHAX_CHAOS_TABLES"
LAYERS, HIDDEN, INNER, EXPERTS, TOP_K, ROWS = 2, 256, 384, 8, 4, 96
FORMATS = ("bf16", "fp16", "q8_0", "q4_0")
TOP_KS = (1, 2, 4)
DTYPES = ("float32", "float16", "bfloat16")


class Input(NamedTuple):
    """[tokens, hidden_size] and twice [tokens, top_k], as the ring carries them."""

    hidden_states: Array
    topk_ids: Array
    topk_weights: Array


def write_model(path: Path) -> None:
    from checkpoints import write_checkpoint

    write_checkpoint(
        path, num_hidden_layers=LAYERS, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )  # fmt: skip


def _rows() -> Input:
    random = np.random.default_rng(5)
    return Input(
        (random.integers(-64, 65, (ROWS, HIDDEN)) / 32).astype(np.float32),
        random.integers(-1, EXPERTS, (ROWS, TOP_K)).astype(np.int32),
        random.uniform(-0.5, 1.0, (ROWS, TOP_K)).astype(np.float32),
    )


def write_tables(out: Path) -> None:
    """The reference over every row, for every format, layer, top_k and dtype, in one file."""
    import moe_reference as reference
    from checkpoints import config_of, experts_of

    from syshaxd import _core

    geometry = {"num_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER}
    config = config_of(
        "Qwen3MoeForCausalLM", num_hidden_layers=LAYERS, hidden_size=HIDDEN, moe_intermediate_size=INNER,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K,
    )  # fmt: skip
    tensors = experts_of(config)
    activations = {kernel["name"]: kernel["activation"] for kernel in _core.kernels()}
    x, ids, weights = _rows()
    tables: dict[str, Array] = {}
    for format in FORMATS:
        runtime = _core.Runtime([{"node": -1, "cpus": [], "threads": 1, "share": 1.0}], chunk_tokens=64)
        model = runtime.create_model("m", geometry | {"top_k": TOP_K}, format)
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}.mlp.experts."
            matrices = [
                [tensors[f"{stem}{expert}.{name}.weight"] for expert in range(EXPERTS)]
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
            model.load_layer(layer, *matrices, "float32")
        model.seal()
        kernels = model.kernels()
        for layer in range(LAYERS):
            experts = [model.dequantized(layer, expert) for expert in range(EXPERTS)]
            for top_k in TOP_KS:
                for dtype in DTYPES:
                    want = reference.moe(
                        x, ids[:, :top_k], weights[:, :top_k], experts, activations[kernels[dtype]], dtype
                    )
                    name = _name(format, layer, top_k, dtype)
                    tables[name + ".value"] = want.value.astype(np.float32)
                    tables[name + ".error"] = (want.error * 1.001 + np.abs(want.value) * 2.0**-23).astype(np.float32)
    np.savez(out, **tables)


def _name(format: str, layer: int, top_k: int, dtype: str) -> str:
    return json.dumps([format, layer, top_k, dtype])


class Answers:
    """The tables, read once in the process from which all clients are forked."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self._tables = {name: stored[name] for name in stored.files}
        self._rows = _rows()

    def input(self, rows: Array, top_k: int, dtype: str) -> Input:
        x, ids, weights = (np.ascontiguousarray(table[rows]) for table in self._rows)
        x = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype)
        return Input(x, np.ascontiguousarray(ids[:, :top_k]), np.ascontiguousarray(weights[:, :top_k]))

    def value(self, rows: Array, format: str, layer: int, top_k: int, dtype: str) -> Array:
        return self._tables[_name(format, layer, top_k, dtype) + ".value"][rows]

    def right(self, got: Array, rows: Array, format: str, layer: int, top_k: int, dtype: str) -> bool:
        """Whether every element of got [tokens, hidden_size] lies within the reference's bound."""
        seen = (got.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else got.astype(np.float32)
        name = _name(format, layer, top_k, dtype)
        difference = np.abs(seen - self._tables[name + ".value"][rows])
        return bool((difference <= self._tables[name + ".error"][rows]).all())


@functools.cache
def of_environment() -> Answers:
    return Answers(Path(os.environ[TABLES_VARIABLE]))
