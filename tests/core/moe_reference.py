"""The MoE layer in float64, slow and obvious, with a bound on the error that float32 arithmetic may make.

Every quantity is a pair (value, error): the core's value lies within `error` of ours. Bounds follow from the inputs:
rounding of sums, rounding of activations (int8 blocks, bf16), and what they do to the next step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
UNIT = 2.0**-24  # half an ulp of float32 around 1
OUTPUT_UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
OUTPUT_TINY = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


class Bounded(NamedTuple):
    value: Array
    error: Array


def to_bfloat16(x: Array) -> npt.NDArray[np.uint16]:
    """Round to nearest even; finite values."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(x: Array) -> npt.NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_dtype(x: Array, dtype: str) -> Array:
    """float32 values as the ring carries them."""
    if dtype == "bfloat16":
        return to_bfloat16(x)
    return x.astype(dtype)


def from_dtype(x: Array, dtype: str) -> npt.NDArray[np.float32]:
    return from_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)


def _q8(x: Bounded) -> Bounded:
    """Blocks of 32: d = amax / 127, q = round(x / d). A value near a tie may go either way."""
    rows, k = x.value.shape
    padded = -(-k // 32) * 32
    value, error = (np.pad(a, ((0, 0), (0, padded - k))).reshape(rows, -1, 32) for a in x)
    d = np.abs(value).max(axis=2, keepdims=True) / 127
    d_error = error.max(axis=2, keepdims=True) / 127 + d * 4 * UNIT
    safe = np.where(d > 0, d, 1.0)
    exact = value / safe
    slack = (error + np.abs(exact) * d_error) / safe + 127 * 4 * UNIT
    q = np.rint(exact)
    steps = np.maximum(np.abs(np.rint(exact - slack) - q), np.abs(np.rint(exact + slack) - q))
    result = Bounded(q * d, (steps + np.abs(q) * d_error / safe) * d)
    return Bounded(*(a.reshape(rows, padded)[:, :k] for a in result))


def _q8x2(x: Bounded) -> Bounded:
    """The second q8 row holds what the first leaves over, whichever way that rounded: half a step of the second is
    what is lost, and a step of it is at most 1/254 of one of the first."""
    rows, k = x.value.shape
    padded = -(-k // 32) * 32
    blocks = np.pad(np.abs(x.value) + x.error, ((0, 0), (0, padded - k))).reshape(rows, -1, 32)
    lost = np.repeat(blocks.max(axis=2) / 127 / 254 / 2, 32, axis=1)[:, :k]
    return Bounded(x.value, x.error + 1.001 * lost + np.abs(x.value) * 4 * UNIT)


def _bf16(x: Bounded) -> Bounded:
    def rounded(a: Array) -> Array:
        return from_bfloat16(to_bfloat16(a)).astype(np.float64)

    value = rounded(x.value)
    slack = x.error + np.abs(x.value) * UNIT
    error = np.maximum(np.abs(rounded(x.value - slack) - value), np.abs(rounded(x.value + slack) - value))
    return Bounded(value, error)


def _f32(x: Bounded) -> Bounded:
    return Bounded(x.value, x.error + np.abs(x.value) * UNIT)


ACTIVATIONS = {"f32": _f32, "bf16": _bf16, "q8": _q8, "q8x2": _q8x2}


def _dense(x: Bounded, weights: Array) -> Bounded:
    """x [tokens, k] times weights [rows, k]."""
    w = weights.astype(np.float64)
    k = w.shape[1]
    magnitude = np.abs(x.value) @ np.abs(w).T
    return Bounded(x.value @ w.T, (k + 16) * UNIT * magnitude + x.error @ np.abs(w).T)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-np.clip(x, -700, None)))


def _silu_mul(gate: Bounded, up: Bounded) -> Bounded:
    s = silu(gate.value)
    s_error = 1.1 * gate.error + np.abs(s) * 16 * UNIT  # the slope of silu is below 1.1
    value = s * up.value
    return Bounded(value, s_error * (np.abs(up.value) + up.error) + np.abs(s) * up.error + np.abs(value) * 4 * UNIT)


def expert(x: Array, weights: tuple[Array, ...], activation: str) -> Bounded:
    """One expert over rows x [tokens, hidden_size]; weights are Model.dequantized's."""
    gate, up, down = weights
    quantise = ACTIVATIONS[activation]
    packed = quantise(Bounded(x.astype(np.float64), np.zeros(x.shape)))
    hidden = quantise(_silu_mul(_dense(packed, gate), _dense(packed, up)))
    return _dense(hidden, down)


def moe(
    x: Array, ids: Array, topk_weights: Array, experts: list[tuple[Array, ...]], activation: str, dtype: str
) -> Bounded:
    """The layer over x [tokens, hidden_size] (float32, exactly what the ring carries): result and its bound."""
    value, error, magnitude = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape)
    for index, weights in enumerate(experts):
        tokens, slots = np.nonzero(ids == index)
        if len(tokens) == 0:
            continue
        y = expert(x[tokens], weights, activation)
        w = topk_weights[tokens, slots].astype(np.float64)[:, None]
        np.add.at(value, tokens, w * y.value)
        np.add.at(error, tokens, np.abs(w) * y.error)
        np.add.at(magnitude, tokens, np.abs(w * y.value))
    additions = ids.shape[1] + 8  # of experts and of nodes
    error = error + additions * UNIT * magnitude
    return Bounded(value, error + (np.abs(value) + error) * OUTPUT_UNIT[dtype] + OUTPUT_TINY[dtype])
