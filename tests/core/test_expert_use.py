"""How often experts were used, against counting the ids that were sent."""

from __future__ import annotations

import core_models as models
import numpy as np
import pytest
from core_models import geometry, hidden_states, load, plan
from hypothesis import given, settings
from hypothesis import strategies as st

CHUNK, EXPERTS, LAYERS = 16, 5, 2
SHAPE = geometry(64, 64, experts=EXPERTS, layers=LAYERS)


@pytest.fixture(scope="module")
def loaded() -> models.Loaded:
    """Of one thread, the caller: no pool outlives this module."""
    return load(SHAPE, "bf16", plan([1]), chunk_tokens=CHUNK)


def expected(ids: np.ndarray) -> tuple[np.ndarray, int]:
    """(tokens of each expert, reads of some expert's weights) of one request, chunk by chunk as the core cuts it."""
    step = min(CHUNK, max(max(CHUNK * SHAPE["top_k"], EXPERTS) // ids.shape[1], 1))
    reads = sum(len(np.unique(chunk[chunk >= 0])) for chunk in np.split(ids, range(step, len(ids), step)))
    return np.bincount(ids[ids >= 0].ravel(), minlength=EXPERTS), reads


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(1, EXPERTS), st.integers(0, LAYERS - 1), st.booleans(), st.integers(0, 9))
def test_each_token_counts_once_for_each_of_its_experts(
    loaded: models.Loaded, tokens: int, top_k: int, layer: int, interrupted: bool, seed: int
) -> None:
    ids = np.random.default_rng(seed).integers(-1, EXPERTS, (tokens, top_k)).astype(np.int32)
    before, reads_before = loaded.model.expert_tokens(), loaded.model.expert_reads()
    weights = np.ones((tokens, top_k), np.float32)
    loaded.model.forward(layer, hidden_states(SHAPE, tokens, seed), ids, weights, "float32", interrupted)
    used = loaded.model.expert_tokens() - before
    counts, reads = expected(ids)
    assert used.dtype == np.uint64 and used.shape == (LAYERS, EXPERTS)
    np.testing.assert_array_equal(used[layer], counts)
    assert not used[1 - layer].any()
    assert loaded.model.expert_reads() - reads_before == reads


def test_a_new_model_has_used_none() -> None:
    model = models._core.Runtime(plan([1])).create_model("new", SHAPE, "bf16")
    assert not model.expert_tokens().any() and model.expert_reads() == 0
