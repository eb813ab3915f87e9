"""What callers may pass: libraries, dtypes, layouts, sizes; and in which words the rest is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import EXPERTS, HIDDEN, LAYERS, FakeDaemon, batch, reference

from syshax import Client, InvalidArgumentError, Model
from syshax.protocol import Dtype


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeDaemon, Model]]:
    with (
        tempfile.TemporaryDirectory(prefix="syshax-test-") as path,
        FakeDaemon(Path(path)) as daemon,
        Client(path) as client,
    ):
        yield daemon, client.open("tiny", max_tokens=16)


def lay_out(array: Any, how: str) -> Any:
    """The same values in another memory layout."""
    if how == "contiguous":
        return array
    if how == "transposed":
        return array.T.copy().T if isinstance(array, np.ndarray) else array.T.contiguous().T
    wide = array.repeat(2, 1) if isinstance(array, np.ndarray) else array.repeat_interleave(2, 1)
    return wide[:, ::2]


def as_torch(hidden: Any, dtype: Dtype) -> torch.Tensor:
    if dtype is Dtype.BFLOAT16:
        return torch.from_numpy(hidden.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(hidden)


def bits(array: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array.contiguous().view(torch.int32 if array.element_size() == 4 else torch.int16).numpy()
    return array.view(np.int32 if array.itemsize == 4 else np.int16)


LAYOUT = st.sampled_from(["contiguous", "transposed", "strided"])
CASE = st.sampled_from(
    [("numpy", Dtype.FLOAT32), ("numpy", Dtype.FLOAT16)] + [("torch", dtype) for dtype in Dtype],
)


@settings(max_examples=120, deadline=None)
@given(
    case=CASE,
    tokens=st.integers(0, 50),
    layer=st.integers(0, LAYERS - 1),
    ids_type=st.sampled_from(["int8", "int16", "int32", "int64"]),
    weights_type=st.sampled_from(["float16", "float32", "float64"]),
    layouts=st.tuples(LAYOUT, LAYOUT, LAYOUT, st.sampled_from(["none", "contiguous", "strided"])),
    seed=st.integers(0, 1 << 20),
)
def test_every_library_dtype_layout_and_size(
    served: tuple[FakeDaemon, Model],
    case: tuple[str, Dtype],
    tokens: int,
    layer: int,
    ids_type: str,
    weights_type: str,
    layouts: tuple[str, str, str, str],
    seed: int,
) -> None:
    daemon, model = served
    library, dtype = case
    hidden, ids, weights = batch(tokens, dtype, seed)
    weights = weights.astype(weights_type).astype(np.float32)
    expected = bits(reference(layer, hidden, ids, weights))
    inputs: tuple[Any, Any, Any] = hidden, ids.astype(ids_type), weights.astype(weights_type)
    if library == "torch":
        inputs = as_torch(hidden, dtype), torch.from_numpy(inputs[1]), torch.from_numpy(inputs[2])
    inputs = lay_out(inputs[0], layouts[0]), lay_out(inputs[1], layouts[1]), lay_out(inputs[2], layouts[2])
    out = None if layouts[3] == "none" else lay_out(inputs[0] * 0, layouts[3])
    calls = daemon.harness.forward_calls()
    result = model.moe(layer, *inputs, out=out)
    assert type(result) is type(inputs[0]) and result.dtype == inputs[0].dtype and result.shape == inputs[0].shape
    assert out is None or result is out
    np.testing.assert_array_equal(bits(result.copy() if library == "numpy" else result), expected)
    assert daemon.harness.forward_calls() - calls == -(-tokens // 16)  # pieces of max_tokens; none for no tokens


def test_unsigned_ids_and_libraries_mixed(served: tuple[FakeDaemon, Model]) -> None:
    _, model = served
    hidden, ids, weights = batch(5)
    ids = np.abs(ids)
    expected = bits(reference(1, hidden, ids, weights))
    for kind in (np.uint8, np.uint16, np.uint32, np.uint64, np.dtype(">i4")):
        np.testing.assert_array_equal(bits(model.moe(1, hidden, ids.astype(kind), weights)), expected)
    mixed = model.moe(1, torch.from_numpy(hidden), ids, torch.from_numpy(weights).to(torch.float64))
    np.testing.assert_array_equal(bits(mixed), expected)


def test_gradients_and_read_only_input_do_not_matter(served: tuple[FakeDaemon, Model]) -> None:
    _, model = served
    hidden, ids, weights = batch(3)
    expected = bits(reference(0, hidden, ids, weights))
    result = model.moe(0, torch.from_numpy(hidden).requires_grad_(), ids, weights)
    assert not result.requires_grad
    np.testing.assert_array_equal(bits(result), expected)
    hidden.flags.writeable = ids.flags.writeable = weights.flags.writeable = False
    np.testing.assert_array_equal(bits(model.moe(0, hidden, ids, weights)), expected)


HIDDEN_STATES, IDS, WEIGHTS = batch(20)


def changed(array: Any, index: tuple[int, int], value: int) -> Any:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((LAYERS, HIDDEN_STATES, IDS, WEIGHTS), ["layer 4", "layers 0 to 3"]),
        ((-1, HIDDEN_STATES, IDS, WEIGHTS), ["layer -1"]),
        ((0, HIDDEN_STATES[0], IDS, WEIGHTS), ["hidden_states", "[64]", "2 dimensions"]),
        ((0, HIDDEN_STATES[:, :-1].copy(), IDS, WEIGHTS), ["63 columns", "hidden_size is 64"]),
        ((0, HIDDEN_STATES.astype(np.float64), IDS, WEIGHTS), ["float64", "float32, float16, bfloat16"]),
        ((0, HIDDEN_STATES.tolist(), IDS, WEIGHTS), ["hidden_states is a list"]),
        ((0, torch.empty(20, HIDDEN, device="meta"), IDS, WEIGHTS), ["device meta", "hidden_states.cpu()"]),
        ((0, HIDDEN_STATES, IDS[:-1], WEIGHTS), ["topk_ids has 19 rows", "20"]),
        ((0, HIDDEN_STATES, IDS, WEIGHTS[:-1]), ["topk_weights has 19 rows"]),
        ((0, HIDDEN_STATES, IDS, WEIGHTS[:, :1]), ["2 columns", "topk_weights 1"]),
        ((0, HIDDEN_STATES, IDS.astype(np.float32), WEIGHTS), ["topk_ids is float32", "integers"]),
        ((0, HIDDEN_STATES, IDS > 0, WEIGHTS), ["topk_ids is bool"]),
        ((0, HIDDEN_STATES, IDS, WEIGHTS.astype(np.int32)), ["topk_weights is int32"]),
        ((0, HIDDEN_STATES, IDS, torch.from_numpy(WEIGHTS.astype(np.int32))), ["topk_weights is int32"]),
        ((0, HIDDEN_STATES, np.zeros((20, 3), np.int32), np.zeros((20, 3), np.float32)), ["top_k 3", "1 to 2"]),
        ((0, HIDDEN_STATES, np.zeros((20, 0), np.int32), np.zeros((20, 0), np.float32)), ["top_k 0", "1 to 2"]),
    ],
)
def test_refusals_say_what_is_wrong(
    served: tuple[FakeDaemon, Model], arguments: tuple[Any, ...], words: list[str]
) -> None:
    _, model = served
    for call in (model.moe, model.submit):
        with pytest.raises(InvalidArgumentError) as error:
            call(*arguments)
        assert call == model.submit or all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint64"])
@pytest.mark.parametrize("token", [0, 15, 16, 19])
@pytest.mark.parametrize("value", [-2, EXPERTS, 2**31, 2**40])
def test_bad_ids_name_the_id_its_index_and_the_range(
    served: tuple[FakeDaemon, Model], kind: str, token: int, value: int
) -> None:
    """Whether the daemon finds it (int32) or the client (wider), and in whichever piece of a cut batch it lies."""
    _, model = served
    if not np.iinfo(kind).min <= value <= np.iinfo(kind).max:
        value = EXPERTS + 1
    ids = changed(np.abs(IDS).astype(kind), (token, 1), value)
    with pytest.raises(InvalidArgumentError) as error:
        model.moe(0, HIDDEN_STATES, ids, WEIGHTS)
    assert str(error.value) == f"topk_ids[{token}, 1] is {value}; allowed are 0 to {EXPERTS - 1}, and -1 for no expert"


@pytest.mark.parametrize(
    ("out", "word"),
    [
        (np.empty((20, HIDDEN), np.float16), "float16"),
        (np.empty((19, HIDDEN), np.float32), "[19, 64]"),
        (torch.empty(20, HIDDEN), "Tensor"),
        ([], "list"),
    ],
)
def test_out_must_be_what_the_result_is(served: tuple[FakeDaemon, Model], out: Any, word: str) -> None:
    _, model = served
    with pytest.raises(InvalidArgumentError, match="out is") as error:
        model.moe(0, HIDDEN_STATES, IDS, WEIGHTS, out=out)
    assert word in str(error.value)


def test_a_read_only_out_is_refused(served: tuple[FakeDaemon, Model]) -> None:
    _, model = served
    out = np.empty((20, HIDDEN), np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="read-only"):
        model.moe(0, HIDDEN_STATES, IDS, WEIGHTS, out=out)


def test_a_session_for_16_bit_refuses_float32(daemon: FakeDaemon, client: Client) -> None:
    with client.open("tiny", dtype="bfloat16") as model, pytest.raises(InvalidArgumentError) as error:
        model.moe(0, HIDDEN_STATES, IDS, WEIGHTS)
    assert 'dtype="float32"' in str(error.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_slots": 65}, "num_slots"),
        ({"top_k": 0}, "top_k"),
        ({"dtype": "float64"}, "float64"),
        ({"priority": "first"}, "first"),
    ],
)
def test_open_refuses_nonsense(daemon: FakeDaemon, client: Client, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgumentError, match=word):
        client.open("tiny", **options)
    with pytest.raises(InvalidArgumentError, match="model"):
        client.open("no/name")
