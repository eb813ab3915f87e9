"""A forward pass that is interrupted as often as can be, or made of several sessions' rows, gives the same bits."""

from __future__ import annotations

import moe_reference as reference
import numpy as np
import pytest
from core_models import DTYPES, FORMATS, Loaded, geometry, hidden_states, load, plan, routing
from hypothesis import given, settings
from hypothesis import strategies as st

from syshaxd import _core

SHAPE = geometry(96, 160, experts=6, top_k=3)
NODES = {"one thread": [1], "two threads": [2], "two nodes": [1, 2]}


@pytest.fixture(scope="module", params=[(format, nodes) for format in FORMATS for nodes in NODES], ids="-".join)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """One for all examples of a test; its threads end with it."""
    format, nodes = request.param
    return load(SHAPE, format, plan(NODES[nodes]), chunk_tokens=24)


@st.composite
def parts(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))


@settings(max_examples=12, deadline=None)
@given(tokens=parts(), dtype=st.sampled_from(DTYPES), top_k=st.integers(1, 6), seed=st.integers(0, 99))
def test_slices_and_parts_change_no_bit(loaded: Loaded, tokens: list[int], dtype: str, top_k: int, seed: int) -> None:
    model, total = loaded.model, sum(tokens)
    x = reference.to_dtype(hidden_states(SHAPE, total, seed), dtype)
    ids, weights = routing(SHAPE, total, top_k, seed)
    whole = model.forward(0, x, ids, weights, dtype)
    for interrupted in (False, True):
        again = model.forward(0, x, ids, weights, dtype, interrupted=interrupted, part_tokens=tokens)
        np.testing.assert_array_equal(again.view(np.uint8), whole.view(np.uint8))


def test_parts_must_be_all_tokens() -> None:
    model = load(SHAPE, "bf16", plan([1])).model
    x, (ids, weights) = hidden_states(SHAPE, 3, 0), routing(SHAPE, 3, 2, 0)
    with pytest.raises(_core.CoreError, match="parts"):
        model.forward(0, x, ids, weights, "float32", part_tokens=[1, 1])
