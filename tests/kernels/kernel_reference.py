"""Slow, obvious numpy versions of the formats and of the matrix product, written from their description alone."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

FORMATS = ("bf16", "fp16", "q8_0", "q4_0")
BLOCK = {"bf16": (1, 2), "fp16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}


def bf16_bits(x: FloatArray) -> npt.NDArray[np.uint16]:
    """Round to nearest even by exact arithmetic: of the two neighbours the nearer, at a tie the even one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    low = (bits >> 16).astype(np.uint32)
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (low & 1 == 1))
    return np.where(np.isnan(x), low | 0x40, low + up).astype(np.uint16)


def bf16_values(bits: npt.NDArray[np.uint16]) -> FloatArray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(format: str, x: FloatArray) -> ByteArray:
    if format == "bf16":
        return bf16_bits(x.reshape(-1)).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if format == "fp16":
            return x.reshape(-1).astype(np.float16).view(np.uint8)
        blocks = x.reshape(-1, 32)
        return encode_q8_0(blocks) if format == "q8_0" else encode_q4_0(blocks)


def with_scale(scale: npt.NDArray[np.float16], q: npt.NDArray[np.integer]) -> ByteArray:
    return np.concatenate([scale.astype(np.float16).reshape(-1, 1).view(np.uint8), q.view(np.uint8)], axis=1).reshape(
        -1
    )


def encode_q8_0(blocks: FloatArray) -> ByteArray:
    finite = np.isfinite(blocks).all(axis=1)
    x = np.where(finite[:, None], blocks, 0)
    d = np.abs(x).max(axis=1) / np.float32(127)
    inverse = np.where(d < 2.0**-126, np.float32(0), np.float32(1) / d).astype(np.float32)
    scaled = x * inverse[:, None]
    q = (np.sign(scaled) * np.floor(np.abs(scaled).astype(np.float64) + 0.5)).astype(np.int8)
    return with_scale(np.where(finite, d, np.float32("nan")).astype(np.float16), q)


NIBBLE_DIVISORS = [-8.0, *(-m / 4 for m in range(28, 36) if m != 32)]


def best_nibbles(x: FloatArray) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
    """x [blocks, 32], finite -> scale and integers of the candidate with the least squared error, the first at a tie.
    float32 throughout, the errors added in four lanes."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)[:, 0]
    best = np.full(len(x), np.inf, np.float32)
    scales, levels = np.zeros(len(x), np.float16), np.zeros(x.shape, np.int8)
    for i, divisor in enumerate(NIBBLE_DIVISORS):
        scale = (extreme / np.float32(divisor)).astype(np.float16)
        wide = scale.astype(np.float32)[:, None]
        tiny = np.abs(extreme) < 1e-30
        inverse = np.where(tiny, 0, np.float32(divisor) / np.where(tiny, 1, extreme)).astype(np.float32)[:, None]
        q = np.clip(np.rint(x * inverse), -8, 7)
        squares = ((q * wide - x) ** 2).reshape(len(x), 8, 4)
        sums = np.zeros((len(x), 4), np.float32)
        for part in range(8):
            sums += squares[:, part]
        error = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
        chosen = (error < best) if i else np.ones(len(x), bool)
        scales, levels = np.where(chosen, scale, scales), np.where(chosen[:, None], q, levels).astype(np.int8)
        best = np.where(chosen, error, best)
    return scales, levels


def encode_q4_0(blocks: FloatArray) -> ByteArray:
    finite = np.isfinite(blocks).all(axis=1)
    scale, q = best_nibbles(np.where(finite[:, None], blocks, 0).astype(np.float32))
    nibbles = (q + 8).astype(np.uint8)
    return with_scale(np.where(finite, scale, np.float16("nan")), nibbles[:, :16] | nibbles[:, 16:] << 4)


def decode(format: str, blocks: ByteArray) -> FloatArray:
    if format == "bf16":
        return bf16_values(blocks.view(np.uint16))
    if format == "fp16":
        return blocks.view(np.float16).astype(np.float32)
    rows = blocks.reshape(-1, BLOCK[format][1])
    scale = np.ascontiguousarray(rows[:, :2]).view(np.float16).astype(np.float32)
    if format == "q8_0":
        q = rows[:, 2:].view(np.int8).astype(np.float32)
    else:
        q = np.concatenate([rows[:, 2:] & 15, rows[:, 2:] >> 4], axis=1).astype(np.float32) - 8
    with np.errstate(invalid="ignore"):
        return (q * scale).reshape(-1)


def quantize_activations(x: FloatArray) -> tuple[npt.NDArray[np.int32], FloatArray]:
    """[tokens, k] -> q [tokens, blocks, 32] and scales [tokens, blocks]; k is padded with zeros."""
    padded = np.zeros((x.shape[0], -(-x.shape[1] // 32) * 32), np.float32)
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(x.shape[0], -1, 32)
    finite = np.isfinite(blocks).all(axis=2)
    blocks = np.where(finite[:, :, None], blocks, 0).astype(np.float32)
    d = np.abs(blocks).max(axis=2) / np.float32(127)
    safe = np.where(d > 0, d, np.float32(1))
    q = np.clip(np.rint(blocks / safe[:, :, None]), -127, 127)
    q = np.where(d[:, :, None] > 0, q, 0).astype(np.int32)
    return q, np.where(finite, d, np.float32("nan"))


def effective_activations(activation: str, x: FloatArray) -> npt.NDArray[np.float64]:
    """What a kernel that takes this kind of activation really multiplies with."""
    if activation == "f32":
        return x.astype(np.float64)
    if activation == "bf16":
        return bf16_values(bf16_bits(x)).astype(np.float64)
    first = dequantized(x)
    if activation == "q8":
        return first
    with np.errstate(invalid="ignore"):
        return first + dequantized((x.astype(np.float64) - first).astype(np.float32))


def dequantized(x: FloatArray) -> npt.NDArray[np.float64]:
    q, d = quantize_activations(x)
    with np.errstate(invalid="ignore"):
        values = q * d[:, :, None].astype(np.float64)
    return values.reshape(x.shape[0], -1)[:, : x.shape[1]]


def product_and_bound(
    activation: str, weights: FloatArray, x: FloatArray
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """[tokens, rows] in float64, and how far a float32 sum of k fused terms may be from it: (k + 4) roundings of half
    an ulp of the sum of magnitudes, plus what underflow may take; infinitely far where the sum may overflow."""
    a, w = effective_activations(activation, x), weights.astype(np.float64)
    k = weights.shape[1] * (2 if activation == "q8x2" else 1)
    magnitudes = np.abs(a) @ np.abs(w).T
    underflow = k * 2.0**-149
    if activation in ("q8", "q8x2"):  # the product of two scales is rounded, then multiplied with an integer sum
        underflow *= 128 * 127
    if activation == "bf16":  # subnormal operands and sums count as zero
        underflow = k * 2.0**-126 + 2.0**-126 * (np.abs(a).sum(1)[:, None] + np.abs(w).sum(1)[None, :])
    return a @ w.T, np.where(magnitudes < 3e38, magnitudes * (k + 4) * 2.0**-24 + underflow, np.inf)
