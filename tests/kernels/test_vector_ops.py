"""The element-wise operations of every ISA against numpy: silu over the whole float range, conversions bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_reference import bf16_bits, bf16_values

from syshaxd import _core

SPECIALS = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 88.0, -88.0, -103.9, -104.1, -150.0, 3e38, -3e38, np.inf, -np.inf]


def every_kind_of_float() -> np.ndarray:
    """Every sign, exponent and a spread of fractions; no NaN."""
    bits = np.arange(0, 2**32, 40009, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    usual = np.linspace(-110, 110, 20001, dtype=np.float32)
    return np.concatenate([x[~np.isnan(x)], usual, np.array(SPECIALS, np.float32)])


def tile_of(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate and up, each a multiple of 16 long -> alternating panels of 16."""
    return np.stack([gate.reshape(-1, 16), up.reshape(-1, 16)], axis=1).reshape(-1)


def padded16(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.zeros(-x.size % 16, np.float32)])


def test_silu_over_the_whole_range(vector) -> None:
    x = padded16(every_kind_of_float())
    y = vector("silu_mul", tile_of(x, np.ones_like(x)))
    wide = np.maximum(x, -700).astype(np.float64)
    exact = wide / (1 + np.exp(-wide))
    finite = np.isfinite(x)
    error = np.abs(y[finite] - exact[finite])
    # exp's polynomial, two products, a sum and a quotient: 4 ulp; below the normal range half a unit of exp, times |x|
    assert (error <= np.abs(exact[finite]) * 4 * 2.0**-23 + (1 + np.abs(wide[finite])) * 2.0**-149).all()
    assert (y[x == np.inf] == np.inf).all() and (y[x == -np.inf] == 0).all()


def test_silu_mul_multiplies_and_keeps_nan(vector) -> None:
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, 64)).astype(np.float32)
    gate[3], up[20] = np.nan, np.nan
    y = vector("silu_mul", tile_of(gate, up))
    one = vector("silu_mul", tile_of(gate, np.ones_like(gate)))
    assert np.array_equal(y, one * up, equal_nan=True)
    assert np.isnan(y[[3, 20]]).all() and np.isnan(y).sum() == 2


def test_silu_is_the_same_on_every_isa_to_the_last_bits(vector) -> None:
    x = padded16(np.linspace(-80, 80, 50000, dtype=np.float32))
    tile = tile_of(x, np.ones_like(x))
    assert np.allclose(vector("silu_mul", tile), _core.vector_op("scalar", "silu_mul", tile), rtol=4 * 2.0**-23, atol=0)


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_accumulate_is_one_fused_operation(vector, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 70))
    number = st.floats(-1e6, 1e6, width=32)
    src, dst = (data.draw(hnp.arrays(np.float32, n, elements=number)) for _ in range(2))
    weight = data.draw(number)
    y = vector("accumulate", weight, src, dst)
    assert np.array_equal(y, _core.vector_op("scalar", "accumulate", weight, src, dst))
    exact = src.astype(np.float64) * weight + dst  # the product is exact; the sum is rounded twice at most
    assert (np.abs(y - exact) <= np.abs(exact) * 2.0**-23 + 2.0**-149).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widen_every_value(vector, dtype: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    expected = bits.view(np.float16).astype(np.float32) if dtype == "float16" else bf16_values(bits)
    assert np.array_equal(vector("widen", bits, dtype), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_rounds_to_nearest_even(vector, dtype: str) -> None:
    x = every_kind_of_float()
    middles = np.arange(65535, dtype=np.uint16)
    low, high = (vector("widen", bits, dtype) for bits in (middles, middles + np.uint16(1)))
    with np.errstate(invalid="ignore", over="ignore"):
        ties = ((low.astype(np.float64) + high) / 2).astype(np.float32)
        x = np.concatenate([x, ties[np.isfinite(ties)]])
        expected = x.astype(np.float16).view(np.uint16) if dtype == "float16" else bf16_bits(x)
    assert np.array_equal(vector("narrow", x, dtype), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nan_stays_nan_with_the_scalar_bits(vector, dtype: str) -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**23, 999, dtype=np.uint32) | np.uint32(0x7F800001) | (np.uint32(1) << 31)
    x = bits.view(np.float32)
    y = vector("narrow", x, dtype)
    assert np.isnan(vector("widen", y, dtype)).all()
    assert np.array_equal(y, _core.vector_op("scalar", "narrow", x, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("values", [0, 1, 7, 8, 9, 15, 16, 17, 31, 33])
def test_tails_of_conversions(vector, dtype: str, values: int) -> None:
    x = np.random.default_rng(values).standard_normal(values).astype(np.float32)
    narrow = vector("narrow", x, dtype)
    assert np.array_equal(narrow, _core.vector_op("scalar", "narrow", x, dtype))
    assert np.array_equal(vector("widen", narrow, dtype), _core.vector_op("scalar", "widen", narrow, dtype))


def test_float32_passes_through_untouched(vector) -> None:
    x = np.random.default_rng(3).integers(0, 2**32, 1000, dtype=np.uint32)
    assert np.array_equal(vector("narrow", x.view(np.float32), "float32").view(np.uint32), x)
    assert np.array_equal(vector("widen", x.view(np.float32), "float32").view(np.uint32), x)
