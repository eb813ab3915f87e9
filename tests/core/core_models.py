"""Small models on synthetic nodes, made quickly and compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import moe_reference as reference
import numpy as np
import numpy.typing as npt

from syshaxd import _core

Array = npt.NDArray[Any]
FORMATS = ("bf16", "fp16", "q8_0", "q4_0")
DTYPES = ("float32", "float16", "bfloat16")
ACTIVATION = {kernel["name"]: kernel["activation"] for kernel in _core.kernels()}
BLOCK = {name: _core.format_blocks(name) for name in FORMATS}


def plan(threads: list[int], shares: list[float] | None = None) -> list[dict[str, Any]]:
    """Unbound, unpinned nodes: as many as there are entries."""
    shares = shares or [1.0] * len(threads)
    return [
        {"node": -1, "cpus": [], "threads": count, "share": share} for count, share in zip(threads, shares, strict=True)
    ]


def geometry(hidden: int, intermediate: int, experts: int = 5, top_k: int = 2, layers: int = 1) -> dict[str, int]:
    return {
        "num_layers": layers,
        "num_experts": experts,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "top_k": top_k,
    }


def random_layer(shape: dict[str, int], seed: int, dtype: str = "float32") -> tuple[list[Array], ...]:
    """gate, up, down for every expert, sized so that outputs are around 1."""
    rng = np.random.default_rng(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]

    def matrices(rows: int, columns: int, gain: float) -> list[Array]:
        scale = np.float32(gain / np.sqrt(columns))
        return [
            reference.to_dtype(rng.standard_normal((rows, columns), np.float32) * scale, dtype)
            for _ in range(shape["num_experts"])
        ]

    return matrices(inner, hidden, 1.0), matrices(inner, hidden, 1.0), matrices(hidden, inner, 2.0)


def check(got: Array, want: reference.Bounded, dtype: str) -> None:
    """Asserts that every element is within the bound."""
    difference = np.abs(reference.from_dtype(got, dtype) - want.value)
    worst = np.unravel_index(np.argmax(difference - want.error), difference.shape)
    assert np.all(difference <= want.error), (
        f"token {worst[0]} column {worst[1]}: {difference[worst]} off, {want.error[worst]} allowed"
    )


@dataclass
class Loaded:
    """A sealed model and the runtime that holds it."""

    runtime: Any
    model: Any
    shape: dict[str, int]
    experts: dict[int, list[tuple[Array, ...]]] = field(default_factory=dict)

    def weights(self, layer: int) -> list[tuple[Array, ...]]:
        if layer not in self.experts:
            self.experts[layer] = [self.model.dequantized(layer, e) for e in range(self.shape["num_experts"])]
        return self.experts[layer]

    def compare(self, layer: int, x: Array, ids: Array, topk_weights: Array, dtype: str) -> Array:
        """Computes, asserts that every element is within the bound, returns the result in the ring's type."""
        sent = reference.to_dtype(x, dtype)
        got = self.model.forward(layer, sent, ids, topk_weights, dtype)
        activation = ACTIVATION[self.model.kernels()[dtype]]
        seen = reference.from_dtype(sent, dtype)
        want = reference.moe(seen, ids, topk_weights, self.weights(layer), activation, dtype)
        check(got, want, dtype)
        return got


def load(
    shape: dict[str, int],
    format: str,
    nodes: list[dict[str, Any]],
    *,
    seed: int = 0,
    dtype: str = "float32",
    chunk_tokens: int = 64,
    **options: Any,
) -> Loaded:
    runtime = _core.Runtime(nodes, chunk_tokens=chunk_tokens, **options)
    model = runtime.create_model("m", shape, format)
    for layer in range(shape["num_layers"]):
        model.load_layer(layer, *random_layer(shape, seed + layer, dtype), dtype)
    model.seal()
    return Loaded(runtime, model, shape)


def routing(shape: dict[str, int], tokens: int, top_k: int, seed: int) -> tuple[Array, Array]:
    """ids with -1 and duplicates, weights of both signs."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, shape["num_experts"], (tokens, top_k)).astype(np.int32)
    return ids, rng.uniform(-0.5, 1.0, (tokens, top_k)).astype(np.float32)


def hidden_states(shape: dict[str, int], tokens: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((tokens, shape["hidden_size"]), np.float32)
