"""The MoE layer against the float64 reference: every format and dtype, any nodes, threads, tokens and routing."""

from __future__ import annotations

from functools import cache
from typing import Any

import core_models as models
import moe_reference as reference
import numpy as np
import pytest
from core_models import ACTIVATION, DTYPES, FORMATS, hidden_states, load, plan, routing
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = {
    "plain": models.geometry(64, 64),
    "awkward": models.geometry(100, 100, experts=7, top_k=3),
    "qwen": models.geometry(160, 768, experts=6, top_k=2),
}
# threads and shares of each node; three nodes over 100 columns (two units) leave one without work.
NODES = {
    "one": plan([2]),
    "two-uneven": plan([1, 2], [1.0, 3.0]),
    "three": plan([3, 1, 2], [2.0, 1.0, 2.5]),
    "four": plan([1, 1, 1, 1]),
    "first-idle": plan([1, 2], [0.0, 1.0]),
}
TOKENS = (1, 2, 7, 16, 33, 200)  # 200 is more than three chunks of 64


@cache
def expectation(format: str, shape_name: str, tokens: int, dtype: str) -> tuple[reference.Bounded, dict[str, Any]]:
    """What any number of nodes must give, and the call that gives it. Weights come from a single node's model."""
    shape = SHAPES[shape_name]
    single = single_node(format, shape_name)
    ids, weights = routing(shape, tokens, shape["top_k"], seed=tokens)
    sent = reference.to_dtype(hidden_states(shape, tokens, seed=tokens), dtype)
    activation = ACTIVATION[single.model.kernels()[dtype]]
    want = reference.moe(reference.from_dtype(sent, dtype), ids, weights, single.weights(0), activation, dtype)
    call = {"layer": 0, "hidden_states": sent, "topk_ids": ids, "topk_weights": weights, "dtype": dtype}
    return want, call


@cache
def single_node(format: str, shape_name: str) -> models.Loaded:
    return load(SHAPES[shape_name], format, plan([1]), seed=3)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_matches_the_reference(format: str, shape_name: str, nodes: list[dict[str, object]]) -> None:
    loaded = load(SHAPES[shape_name], format, nodes, seed=3)
    for i, tokens in enumerate(TOKENS):
        dtype = DTYPES[i % len(DTYPES)]
        want, call = expectation(format, shape_name, tokens, dtype)
        models.check(loaded.model.forward(**call), want, dtype)
    for seen, single in zip(loaded.weights(0), single_node(format, shape_name).weights(0), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(seen, single, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_dtype_at_decode_and_prefill(format: str, dtype: str) -> None:
    shape = SHAPES["awkward"]
    loaded = load(shape, format, NODES["three"], seed=5)
    for tokens in (1, 5, 130):
        ids, weights = routing(shape, tokens, 2, seed=tokens)
        loaded.compare(0, hidden_states(shape, tokens, seed=tokens), ids, weights, dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("hidden", "tokens"), [(64, 95), (64, 96), (64, 97), (64, 193), (9000, 12), (9000, 25)])
def test_one_expert_with_more_tokens_than_a_kernel_call_takes(format: str, hidden: int, tokens: int) -> None:
    """A call takes at most 96 tokens, fewer where rows are long."""
    shape = models.geometry(hidden, 64, experts=1, top_k=1)
    loaded = load(shape, format, plan([2]), seed=tokens, chunk_tokens=256)
    ids, weights = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
    loaded.compare(0, hidden_states(shape, tokens, seed=hidden), ids, weights, "float32")


@settings(max_examples=25, deadline=None)
@given(
    hidden=st.integers(1, 140),
    intermediate=st.integers(1, 200),
    experts=st.integers(1, 9),
    threads=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    tokens=st.integers(1, 90),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_legal_shape(
    hidden: int,
    intermediate: int,
    experts: int,
    threads: list[int],
    tokens: int,
    format: str,
    dtype: str,
    data: st.DataObject,
) -> None:
    top_k = data.draw(st.integers(1, experts))
    shares = data.draw(st.lists(st.floats(0.01, 10), min_size=len(threads), max_size=len(threads)))
    shape = models.geometry(hidden, intermediate, experts, top_k)
    loaded = load(shape, format, plan(threads, shares), seed=tokens, chunk_tokens=data.draw(st.integers(1, 64)))
    used_top_k = data.draw(st.integers(1, experts))
    ids, weights = routing(shape, tokens, used_top_k, seed=hidden)
    loaded.compare(0, hidden_states(shape, tokens, seed=intermediate), ids, weights, dtype)


@pytest.mark.parametrize("format", FORMATS)
def test_threads_do_not_change_a_bit(format: str) -> None:
    shape = SHAPES["qwen"]
    ids, weights = routing(shape, 150, 3, seed=1)
    x = hidden_states(shape, 150, seed=1)
    shares = [1.0, 2.0]
    results = [
        load(shape, format, plan(threads, shares), seed=9).model.forward(0, x, ids, weights, "float32")
        for threads in ([1, 1], [3, 2], [2, 3])
    ]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_does_not_depend_on_its_neighbours(format: str) -> None:
    shape = SHAPES["qwen"]
    loaded = load(shape, format, plan([2]), seed=9)
    ids, weights = routing(shape, 130, 3, seed=2)
    x = hidden_states(shape, 130, seed=2)
    together = loaded.model.forward(0, x, ids, weights, "float32")
    for token in (0, 63, 64, 129):
        alone = loaded.model.forward(
            0, x[token : token + 1], ids[token : token + 1], weights[token : token + 1], "float32"
        )
        assert np.array_equal(alone[0], together[token])


def test_no_expert_gives_zeros_and_duplicates_add_up() -> None:
    shape = SHAPES["plain"]
    loaded = load(shape, "bf16", plan([1, 1]), seed=1)
    x = hidden_states(shape, 3, seed=0)
    none = np.full((3, 2), -1, np.int32)
    assert not loaded.model.forward(0, x, none, np.ones((3, 2), np.float32), "float32").any()
    twice = np.array([[2, 2], [1, -1], [-1, 1]], np.int32)
    loaded.compare(0, x, twice, np.array([[0.25, 0.5], [1, 9], [9, 1]], np.float32), "float32")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_stays_in_its_token(format: str, poison: float) -> None:
    shape = SHAPES["awkward"]
    loaded = load(shape, format, NODES["three"], seed=2)
    ids, weights = routing(shape, 20, 2, seed=4)
    ids[5] = [1, 2]
    x = hidden_states(shape, 20, seed=4)
    clean = loaded.model.forward(0, x, ids, weights, "float32")
    x[5, 17] = poison
    dirty = loaded.model.forward(0, x, ids, weights, "float32")
    others = np.arange(20) != 5
    assert np.array_equal(dirty[others], clean[others])
    assert not np.isfinite(dirty[5]).any()


def test_padding_invents_no_nan() -> None:
    """Infinity times the zero weights of padded columns is NaN, which must not reach the sum."""
    shape = models.geometry(64, 100, experts=1, top_k=1)
    runtime = models._core.Runtime(plan([1]))
    model = runtime.create_model("m", shape, "bf16")
    ones = np.zeros((100, 64), np.float32)
    ones[:, 0] = 1.0
    model.load_layer(0, [ones], [ones], [np.full((64, 100), 0.01, np.float32)], "float32")
    model.seal()
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = np.inf
    y = model.forward(0, x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), "float32")
    assert np.isposinf(y).all()


def test_layers_differ_and_calls_are_counted() -> None:
    shape = models.geometry(64, 64, layers=3)
    loaded = load(shape, "q8_0", plan([2]), seed=20)
    x, (ids, weights) = hidden_states(shape, 4, seed=0), routing(shape, 4, 2, seed=0)
    results = [loaded.compare(layer, x, ids, weights, "float32") for layer in range(3)]
    assert not np.array_equal(results[0], results[1])
    assert not np.array_equal(results[1], results[2])
    assert loaded.model.forward_calls() == 3
    assert loaded.runtime.stats()["busy_ns"][0] > 0


BAD_CALLS = {
    "layer": ({"layer": 1}, "layer 1"),
    "id too large": ({"ids": np.array([[0, 5]], np.int32)}, r"topk_ids\[0, 1\] is 5"),
    "id too small": ({"ids": np.array([[-2, 0]], np.int32)}, r"topk_ids\[0, 0\] is -2"),
    "ids of another type": ({"ids": np.zeros((1, 2), np.int64)}, "topk_ids"),
    "top_k above num_experts": ({"ids": np.zeros((1, 6), np.int32), "weights": np.ones((1, 6), np.float32)}, "top_k 6"),
    "hidden size": ({"x": np.zeros((1, 63), np.float32)}, r"hidden_states is \[1, 63\]"),
    "dtype": ({"dtype": "int8"}, "int8"),
    "dtype of the array": ({"dtype": "float16"}, "hidden_states"),
    "weights' shape": ({"weights": np.ones((1, 3), np.float32)}, "topk_weights"),
    "no token": (
        {
            "x": np.zeros((0, 64), np.float32),
            "ids": np.zeros((0, 2), np.int32),
            "weights": np.zeros((0, 2), np.float32),
        },
        "0 tokens",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_wrong_calls_are_refused(change: dict[str, object], message: str) -> None:
    loaded = load(SHAPES["plain"], "bf16", plan([1]))
    call = {
        "layer": 0,
        "x": np.zeros((1, 64), np.float32),
        "ids": np.zeros((1, 2), np.int32),
        "weights": np.ones((1, 2), np.float32),
        "dtype": "float32",
    }
    call.update(change)
    with pytest.raises(models._core.CoreError, match=message) as caught:
        loaded.model.forward(call["layer"], call["x"], call["ids"], call["weights"], call["dtype"])
    assert caught.value.code == "invalid_argument"
