"""Formats: every encoder and decoder against numpy, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_reference import BLOCK, FORMATS, bf16_bits, decode, encode

from syshaxd import _core

any_float = st.floats(width=32, allow_nan=True, allow_infinity=True)


def test_the_formats_and_their_blocks() -> None:
    assert _core.formats()[:4] == list(FORMATS)
    assert {name: _core.format_blocks(name) for name in FORMATS} == BLOCK


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=200)
@given(x=hnp.arrays(np.float32, st.sampled_from([32, 64, 96]), elements=any_float))
def test_encode_any_float(format: str, x: np.ndarray) -> None:
    blocks = _core.encode(format, x)
    expected = encode(format, x)
    if format in ("bf16", "fp16"):  # a NaN's payload is the hardware's business; that it is one is ours
        nan = np.isnan(x)
        assert (blocks.view(np.uint16)[~nan] == expected.view(np.uint16)[~nan]).all()
        assert np.isnan(_core.decode(format, blocks, x.size)[nan]).all()
    else:
        assert same_blocks(format, blocks, expected)


def same_blocks(format: str, a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, or NaN scales over the same values."""
    rows_a, rows_b = a.reshape(-1, BLOCK[format][1]), b.reshape(-1, BLOCK[format][1])
    scale_a = np.ascontiguousarray(rows_a[:, :2]).view(np.float16)
    scale_b = np.ascontiguousarray(rows_b[:, :2]).view(np.float16)
    scales = np.array_equal(scale_a, scale_b, equal_nan=True)
    return bool(scales and (rows_a[:, 2:] == rows_b[:, 2:]).all())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 1e4])
def test_encode_numbers_of_every_size(format: str, scale: float) -> None:
    x = (np.random.default_rng(1).standard_normal(32 * 500) * scale).astype(np.float32)
    assert (_core.encode(format, x) == encode(format, x)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_decode_any_bytes(format: str) -> None:
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, 3000 * BLOCK[format][1], dtype=np.uint8)
    values = 3000 * BLOCK[format][0]
    assert np.array_equal(_core.decode(format, blocks, values), decode(format, blocks), equal_nan=True)


def test_every_fp16_and_bf16_decodes() -> None:
    bits = np.arange(65536, dtype=np.uint16).view(np.uint8)
    for format in ("fp16", "bf16"):
        assert np.array_equal(_core.decode(format, bits, 65536), decode(format, bits), equal_nan=True)


def test_bf16_ties_go_to_even() -> None:
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    assert _core.encode("bf16", x).view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]
    assert bf16_bits(x).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_non_number_decodes_to_nan_and_spares_its_neighbours(format: str, poison: float) -> None:
    x = np.ones(96, np.float32)
    x[40] = poison
    y = _core.decode(format, _core.encode(format, x), 96)
    assert np.isnan(y[32:64]).all()
    assert np.isfinite(y[:32]).all() and np.isfinite(y[64:]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_represents_comes_back(format: str) -> None:
    blocks = encode(format, np.random.default_rng(3).standard_normal(3200).astype(np.float32))
    x = decode(format, blocks)
    assert np.array_equal(_core.decode(format, _core.encode(format, x), x.size), x)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(_core.CoreError, match='unknown weight format "q9"') as caught:
        _core.encode("q9", np.zeros(32, np.float32))
    assert caught.value.code == "invalid_argument"
    with pytest.raises(_core.CoreError, match="no multiple of the block"):
        _core.encode("q8_0", np.zeros(33, np.float32))
    with pytest.raises(_core.CoreError, match="do not take"):
        _core.decode("q8_0", np.zeros(33, np.uint8), 32)


def test_q4_0_takes_the_scale_for_all_values_not_for_the_largest() -> None:
    """Never worse than the scale of the largest value, and better over many blocks."""
    x = np.random.default_rng(4).standard_normal((2000, 32)).astype(np.float32)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    scale = (extreme / -8).astype(np.float16).astype(np.float64)
    plain = ((np.clip(np.rint(x * -8 / extreme), -8, 7) * scale - x) ** 2).sum(axis=1)
    chosen = ((_core.decode("q4_0", _core.encode("q4_0", x.ravel()), x.size).reshape(x.shape) - x) ** 2).sum(axis=1)
    assert (chosen <= plain * 1.0001).all()
    assert chosen.sum() < 0.95 * plain.sum()
