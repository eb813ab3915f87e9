"""Every row of the kernel table against the scalar row (bit for bit where that is promised) and against numpy in
float64, at every token count up to and around the tiles' edges and at awkward shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_reference import FORMATS, decode, encode, product_and_bound

from syshaxd import _core

TOKENS = [*range(1, 18), 31, 33, 64, 100]
ROWS = [1, 15, 16, 17, 33, 48, 64, 65, 80, 129]
K = [32, 64, 96, 128, 224, 768]


def scalar_name(format: str, activation: str = "") -> str:
    return f"{format}_{activation or ('q8' if format in ('q8_0', 'q4_0') else 'f32')}_scalar"


def random_blocks(rng: np.random.Generator, format: str, rows: int, k: int) -> np.ndarray:
    scale = 10.0 ** rng.uniform(-3, 1, (rows, 1))
    return encode(format, (rng.standard_normal((rows, k)) * scale).astype(np.float32))


def check(row, blocks: np.ndarray, rows: int, k: int, x: np.ndarray) -> np.ndarray:
    """Against numpy always, against the scalar row where the row promises its bits."""
    y = row.core.run_kernel(row.name, blocks, rows, k, x)
    with np.errstate(invalid="ignore", over="ignore"):
        exact, bound = product_and_bound(row.activation, decode(row.format, blocks).reshape(rows, k), x)
    finite = np.isfinite(exact) & np.isfinite(bound)
    assert (np.abs(y[finite] - exact[finite]) <= bound[finite]).all()
    if row.activation != "bf16":
        assert np.array_equal(
            y, _core.run_kernel(scalar_name(row.format, row.activation), blocks, rows, k, x), equal_nan=True
        )
    return y


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_token_count(row, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    for rows, k in ((33, 96), (80, 128)):
        x = rng.standard_normal((tokens, k)).astype(np.float32)
        check(row, random_blocks(rng, row.format, rows, k), rows, k, x)


@pytest.mark.parametrize("rows", ROWS)
def test_every_row_count(row, rows: int) -> None:
    rng = np.random.default_rng(rows)
    for tokens in (1, 2, 3, 5, 7):
        x = rng.standard_normal((tokens, 64)).astype(np.float32)
        check(row, random_blocks(rng, row.format, rows, 64), rows, 64, x)


@pytest.mark.parametrize("k", K)
def test_every_k(row, k: int) -> None:
    rng = np.random.default_rng(k)
    for tokens in (1, 6):
        x = (rng.standard_normal((tokens, k)) * 10.0 ** rng.uniform(-3, 3, (tokens, 1))).astype(np.float32)
        check(row, random_blocks(rng, row.format, 17, k), 17, k, x)


def test_a_real_layer_shape(row) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 2048)).astype(np.float32)
    check(row, random_blocks(rng, row.format, 48, 2048), 48, 2048, x)


def extreme_blocks(format: str, rows: int, k: int, case: str) -> np.ndarray:
    """Blocks whose stored integers or scales are extreme, put together byte by byte."""
    if format in ("bf16", "fp16"):
        lowest = np.float32(-65504 if format == "fp16" else -3e38)
        value = {"lowest": lowest, "highest": -lowest, "zero": np.float32(0), "subnormal": np.float32(6e-8)}[case]
        return encode(format, np.full((rows, k), value, np.float32))
    scale = np.float16({"subnormal": 6e-8, "zero": 0.0}.get(case, 0.01))
    q = {"lowest": 0x80, "highest": 0x7F, "zero": 0x80, "subnormal": 0x7F}[case]
    if format == "q4_0":
        q = {0x80: 0x00, 0x7F: 0xFF}[q]
    block = np.concatenate([np.array([scale]).view(np.uint8), np.full(32 if format == "q8_0" else 16, q, np.uint8)])
    return np.tile(block, rows * k // 32)


@pytest.mark.parametrize("case", ["lowest", "highest", "zero", "subnormal"])
@pytest.mark.parametrize("activation", [127.0, -127.0, 0.0, 1e-42])
def test_extreme_weights_and_activations(row, case: str, activation: float) -> None:
    for tokens in (1, 5, 12):
        check(row, extreme_blocks(row.format, 20, 128, case), 20, 128, np.full((tokens, 128), activation, np.float32))


def test_signs_that_saturate_naive_byte_products(row) -> None:
    """Alternating extremes, so that pairs of products reach both ends of what 16 bits hold."""
    x = np.where(np.arange(128) % 4 < 2, 127.0, -127.0).astype(np.float32)[None].repeat(5, 0)
    for case in ("lowest", "highest"):
        blocks = extreme_blocks(row.format, 16, 128, case)
        check(row, blocks, 16, 128, x)
        check(row, blocks, 16, 128, -x)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_bad_activation_shows_in_its_token_alone(row, poison: float) -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((9, 128)).astype(np.float32)
    blocks = random_blocks(rng, row.format, 20, 128)
    good = check(row, blocks, 20, 128, x)
    x[4, 77] = poison
    bad = check(row, blocks, 20, 128, x)
    assert not np.isfinite(bad[4]).any()
    others = np.arange(9) != 4
    assert np.array_equal(bad[others], good[others])


def test_a_bad_weight_shows_in_its_row_alone(row) -> None:
    rng = np.random.default_rng(7)
    w = rng.standard_normal((20, 128)).astype(np.float32)
    x = rng.standard_normal((9, 128)).astype(np.float32)
    good = check(row, encode(row.format, w), 20, 128, x)
    w[13, 5] = np.nan
    bad = check(row, encode(row.format, w), 20, 128, x)
    assert np.isnan(bad[:, 13]).all()
    others = np.arange(20) != 13
    assert np.array_equal(bad[:, others], good[:, others])


def test_tokens_do_not_depend_on_their_batch(row) -> None:
    """A token's result is the same bits alone and in any batch: what makes serving reproducible."""
    rng = np.random.default_rng(8)
    blocks = random_blocks(rng, row.format, 40, 192)
    x = rng.standard_normal((23, 192)).astype(np.float32)
    together = row.core.run_kernel(row.name, blocks, 40, 192, x)
    for tokens in (1, 2, 3, 4, 5, 6, 7, 11):
        parts = [row.core.run_kernel(row.name, blocks, 40, 192, x[i : i + tokens]) for i in range(0, 23, tokens)]
        assert np.array_equal(np.concatenate(parts), together)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_input(row, data: st.DataObject) -> None:
    rows, blocks_k, tokens = (data.draw(st.integers(1, n)) for n in (40, 5, 14))
    k = blocks_k * 32
    number = st.floats(-1e4, 1e4, width=32)
    w = data.draw(hnp.arrays(np.float32, (rows, k), elements=number, fill=number))
    x = data.draw(hnp.arrays(np.float32, (tokens, k), elements=number, fill=number))
    check(row, encode(row.format, w), rows, k, x)


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 40), blocks_k=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_unpack_is_the_inverse_of_pack(format: str, rows: int, blocks_k: int, seed: int) -> None:
    values, size = _core.format_blocks(format)
    k = blocks_k * 32
    blocks = np.random.default_rng(seed).integers(0, 256, rows * k // values * size, dtype=np.uint8)
    assert np.array_equal(_core.pack_unpack(scalar_name(format), blocks, rows, k), blocks)


def test_run_kernel_refuses_what_does_not_fit() -> None:
    x = np.zeros((1, 64), np.float32)
    for arguments in (
        ("q8_0_q8_scalar", np.zeros(68, np.uint8), 1, 63, x),
        ("q8_0_q8_scalar", np.zeros(67, np.uint8), 1, 64, x),
        ("q8_0_q8_scalar", np.zeros(68, np.uint8), 1, 64, np.zeros((1, 65), np.float32)),
        ("q8_0_q8_scalar", np.zeros(68, np.uint8), 1, 64, np.zeros((0, 64), np.float32)),
        ("no_such_kernel", np.zeros(68, np.uint8), 1, 64, x),
    ):
        with pytest.raises(_core.CoreError) as caught:
            _core.run_kernel(*arguments)
        assert caught.value.code == "invalid_argument"
