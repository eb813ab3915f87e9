"""Loading: exact bits where the format allows, refusals with numbers, memory used and given back."""

from __future__ import annotations

import os
import threading
from typing import Any

import core_models as models
import moe_reference as reference
import numpy as np
import pytest
from core_models import FORMATS, geometry, load, plan, random_layer
from hypothesis import given, settings
from hypothesis import strategies as st

from syshaxd import _core

SHAPE = geometry(100, 100, experts=3, top_k=2)


def new_model(format: str = "bf16", shape: dict[str, int] = SHAPE) -> Any:
    return _core.Runtime(plan([2, 1])).create_model("m", shape, format)


@pytest.mark.parametrize(
    ("format", "dtype", "array"), [("bf16", "bfloat16", np.uint16), ("fp16", "float16", np.float16)]
)
def test_stored_types_keep_every_bit(format: str, dtype: str, array: type) -> None:
    """All 65,536 bit patterns, NaNs and denormals included, go through packing unchanged."""
    shape = geometry(256, 256, experts=1, top_k=1)
    model = new_model(format, shape)
    patterns = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    matrices = [patterns.view(array), patterns.T.copy().view(array), patterns[::-1].copy().view(array)]
    model.load_layer(0, matrices[:1], matrices[1:2], matrices[2:], dtype)
    for seen, source in zip(model.dequantized(0, 0), matrices, strict=True):
        want = reference.from_dtype(source, dtype)
        numbers = ~np.isnan(want)
        assert np.array_equal(seen[numbers].view(np.uint32), want[numbers].view(np.uint32))
        assert np.isnan(seen[~numbers]).all()


@settings(max_examples=20, deadline=None)
@given(
    hidden=st.integers(1, 150),
    intermediate=st.integers(1, 300),
    shares=st.lists(st.floats(0.0, 4.0), min_size=1, max_size=4).filter(lambda s: sum(s) > 0.1),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(models.DTYPES),
)
def test_weights_read_back_as_the_format_stores_them(
    hidden: int, intermediate: int, shares: list[float], format: str, dtype: str
) -> None:
    shape = geometry(hidden, intermediate, experts=2, top_k=1)
    loaded = load(shape, format, plan([1] * len(shares), shares), seed=hidden, dtype=dtype)
    for matrices, position in zip(random_layer(shape, hidden, dtype), range(3), strict=True):
        for expert, matrix in enumerate(matrices):
            seen = loaded.weights(0)[expert][position]
            assert np.array_equal(seen, stored(reference.from_dtype(matrix, dtype), format))


def stored(matrix: models.Array, format: str) -> models.Array:
    """What the format makes of a matrix: rows zero-padded to whole blocks, encoded, decoded."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // 64) * 64), np.float32)
    padded[:, :columns] = matrix
    blocks = _core.encode(format, padded.ravel())
    return _core.decode(format, blocks, padded.size).reshape(padded.shape)[:, :columns]


@pytest.mark.parametrize("format", FORMATS)
def test_pool_is_the_weights_once(format: str) -> None:
    """Over any nodes: at most 1.05 x the weights' bytes, split as planned."""
    shape = geometry(512, 768, experts=4, top_k=2, layers=2)
    values, size = models.BLOCK[format]
    weights = 3 * 512 * 768 * 4 * 2 // values * size
    for nodes in (plan([1]), plan([1, 1], [1, 2]), plan([1, 1, 1, 1])):
        model = _core.Runtime(nodes).create_model("m", shape, format)
        assert weights <= model.pool_bytes() <= 1.05 * weights
        assert model.node_bytes() == dict(enumerate(_core.Runtime.plan_bytes(shape, format, nodes)))
        total = sum(node["share"] for node in nodes)
        for index, node in enumerate(nodes):
            assert model.node_bytes()[index] == pytest.approx(weights * node["share"] / total, rel=0.06)


def good_layer(dtype: str = "float32") -> dict[str, Any]:
    gate, up, down = random_layer(SHAPE, 1, dtype)
    return {"layer": 0, "gate": gate, "up": up, "down": down, "dtype": dtype}


def replaced(name: str, index: int, value: Any) -> dict[str, Any]:
    layer = good_layer()
    layer[name][index] = value
    return layer


BAD_LAYERS = {
    "layer": (dict(good_layer(), layer=1), "layer 1"),
    "dtype": (dict(good_layer(), dtype="int8"), "int8"),
    "too few experts": (dict(good_layer(), up=good_layer()["up"][:2]), "up has 2 matrices"),
    "transposed": (replaced("down", 1, np.zeros((100, 99), np.float32)), r"down\[1\] has shape \[100, 99\]"),
    "too small": (replaced("gate", 2, np.zeros((100, 100), np.float16)), r"gate\[2\].*20000 bytes"),
    "bytes": (replaced("gate", 0, b"123"), r"gate\[0\].*3 bytes"),
    "strided": (replaced("up", 0, np.zeros((100, 200), np.float32)[:, ::2]), r"up\[0\] is not in C order"),
    "no buffer": (replaced("up", 0, "weights"), r"up\[0\] is no buffer"),
}


@pytest.mark.parametrize(("layer", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS.keys())
def test_wrong_matrices_are_refused(layer: dict[str, Any], message: str) -> None:
    model = new_model()
    with pytest.raises(_core.CoreError, match=message) as caught:
        model.load_layer(**layer)
    assert caught.value.code == "invalid_argument"
    model.load_layer(**good_layer())
    model.seal()


def test_any_contiguous_buffer_is_taken() -> None:
    layer = good_layer()
    layer["gate"] = [matrix.tobytes() for matrix in layer["gate"]]
    layer["up"] = [memoryview(matrix) for matrix in layer["up"]]
    layer["down"] = [matrix.reshape(-1) for matrix in layer["down"]]
    model, same = new_model(), new_model()
    model.load_layer(**layer)
    same.load_layer(**good_layer())
    for expert in range(3):
        for a, b in zip(model.dequantized(0, expert), same.dequantized(0, expert), strict=True):
            assert np.array_equal(a, b)


BAD_SHAPES = [
    {"num_layers": 0},
    {"num_experts": 0},
    {"hidden_size": 0},
    {"intermediate_size": 0},
    {"top_k": 0},
    {"top_k": 4},
    {"hidden_size": 1 << 30},
    {"num_layers": -1},
    {"num_layers": "two"},
]


@pytest.mark.parametrize("change", BAD_SHAPES, ids=str)
def test_wrong_geometry_is_refused(change: dict[str, Any]) -> None:
    runtime = _core.Runtime(plan([1]))
    with pytest.raises(_core.CoreError, match=next(iter(change))) as caught:
        runtime.create_model("m", dict(SHAPE, **change), "bf16")
    assert caught.value.code == "invalid_argument"
    with pytest.raises(_core.CoreError):
        _core.Runtime.plan_bytes(dict(SHAPE, **change), "bf16", plan([1]))


def test_unknown_format_is_refused() -> None:
    with pytest.raises(_core.CoreError, match="q3_k"):
        new_model("q3_k")


def test_every_step_in_its_turn() -> None:
    model = new_model()
    x, ids, weights = np.zeros((1, 100), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
    with pytest.raises(_core.CoreError, match="1 of 1 layers are not loaded"):
        model.seal()
    model.load_layer(**good_layer())
    with pytest.raises(_core.CoreError, match="still being loaded") as caught:
        model.forward(0, x, ids, weights, "float32")
    assert caught.value.code == "model_not_ready"
    model.seal()
    with pytest.raises(_core.CoreError, match="is sealed"):
        model.load_layer(**good_layer())
    with pytest.raises(_core.CoreError, match="is sealed"):
        model.seal()
    model.forward(0, x, ids, weights, "float32")


def attach(runtime: Any, model: Any) -> None:
    layout = runtime.session_layout(model, 8, 2, 4, 2)
    shm, doorbell = os.memfd_create("ring"), os.eventfd(0)
    os.posix_fallocate(shm, 0, layout["total_bytes"])
    try:
        runtime.add_session(1, model, shm, doorbell, bytes(16), 8, 2, 4, 2, 0)
    finally:
        os.close(shm)
        os.close(doorbell)


def test_sessions_begin_only_with_a_sealed_model_and_a_running_data_plane() -> None:
    runtime = _core.Runtime(plan([1]))
    model = runtime.create_model("m", SHAPE, "q8_0")
    with pytest.raises(_core.CoreError, match="data plane") as caught:
        attach(runtime, model)
    assert caught.value.code == "shutting_down"
    runtime.start()
    with pytest.raises(_core.CoreError, match="still being loaded") as caught:
        attach(runtime, model)
    assert caught.value.code == "model_not_ready"
    model.load_layer(**good_layer())
    model.seal()
    attach(runtime, model)
    assert [session["session_id"] for session in runtime.session_stats()] == [1]
    runtime.drop_model(model)
    assert model.pool_bytes() == 0
    with pytest.raises(_core.CoreError, match="unloaded"):
        attach(runtime, model)
    runtime.remove_session(1)
    assert runtime.session_stats() == []
    runtime.stop()


def test_a_dropped_model_answers_errors() -> None:
    loaded = load(SHAPE, "q8_0", plan([1]))
    loaded.runtime.drop_model(loaded.model)
    loaded.runtime.drop_model(loaded.model)
    assert loaded.model.pool_bytes() == 0
    x, ids, weights = np.zeros((1, 100), np.float32), np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
    for use in (lambda: loaded.model.forward(0, x, ids, weights, "float32"), lambda: loaded.model.dequantized(0, 0)):
        with pytest.raises(_core.CoreError, match="unloaded"):
            use()


def test_loading_and_serving_at_once() -> None:
    """Layers of one model come from several threads while another model computes; both stay right."""
    runtime = _core.Runtime(plan([2]))
    serving = load(SHAPE, "q8_0", plan([2]), seed=7)
    shape = dict(SHAPE, num_layers=8)
    model = runtime.create_model("n", shape, "q4_0")
    layers = [random_layer(shape, 50 + i) for i in range(8)]
    loaders = [threading.Thread(target=model.load_layer, args=(i, *layers[i], "float32")) for i in range(8)]
    for loader in loaders:
        loader.start()
    x = models.hidden_states(SHAPE, 9, seed=1)
    ids, weights = models.routing(SHAPE, 9, 2, seed=1)
    first = serving.compare(0, x, ids, weights, "float32")
    while any(loader.is_alive() for loader in loaders):
        assert np.array_equal(serving.model.forward(0, x, ids, weights, "float32"), first)
    for loader in loaders:
        loader.join()
    model.seal()
    other = models.Loaded(runtime, model, shape)
    for layer in range(8):
        other.compare(layer, x, ids, weights, "float32")


def test_random_fill_makes_all_experts_different() -> None:
    model = new_model(shape=dict(SHAPE, num_layers=2))
    model.fill_random(1)
    model.seal()
    seen = {model.dequantized(layer, e)[which].tobytes() for layer in range(2) for e in range(3) for which in range(3)}
    assert len(seen) == 18
