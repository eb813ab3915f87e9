"""Models made again from the arenas of a sealed one: the same numbers, no copies, and refusals of what does not fit."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_models import FORMATS, Loaded, geometry, hidden_states, load, plan, random_layer, routing

from syshaxd import _core

SHAPE = geometry(100, 300, experts=3, top_k=2, layers=2)
OPTIONS = {"chunk_tokens": 64}


@contextmanager
def arenas_of(model: Any) -> Iterator[dict[int, int]]:
    """Index -> descriptor; closed at the end."""
    arenas = {arena["index"]: arena["fd"] for arena in model.arenas()}
    try:
        yield arenas
    finally:
        for fd in arenas.values():
            os.close(fd)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def outputs(model: Any, dtype: str = "float32") -> list[np.ndarray]:
    ids, weights = routing(SHAPE, 7, 2, 5)
    return [model.forward(layer, hidden_states(SHAPE, 7, layer), ids, weights, dtype) for layer in range(2)]


def dropped(loaded: Loaded) -> None:
    loaded.runtime.drop_model(loaded.model)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("nodes", [plan([1]), plan([2, 1], [2.0, 1.0])], ids=["one node", "two nodes"])
def test_an_adopted_model_computes_the_same_bits(format: str, nodes: list[dict[str, Any]]) -> None:
    loaded = load(SHAPE, format, nodes)
    expected = outputs(loaded.model)
    with arenas_of(loaded.model) as arenas:
        sizes = loaded.model.node_bytes()
        assert {index: os.fstat(fd).st_size for index, fd in arenas.items()} == sizes
        dropped(loaded)  # the arenas live on in the descriptors
        runtime = _core.Runtime(nodes, **OPTIONS)
        model = runtime.adopt_model("m", SHAPE, format, arenas)
    assert (
        model.packing.startswith(format) and model.node_bytes() == sizes and model.pool_bytes() == sum(sizes.values())
    )
    for seen, wanted in zip(outputs(model), expected, strict=True):
        np.testing.assert_array_equal(seen, wanted)
    model.prefault()
    with pytest.raises(_core.CoreError, match="cannot load a layer of model m: it is sealed"):
        model.load_layer(0, *random_layer(SHAPE, 1), "float32")


def test_nothing_is_read_or_copied() -> None:
    """The adopted model's memory is the arena's own: it takes no more of it, and its pages are the same ones."""
    shape = geometry(256, 1024, experts=8, top_k=2, layers=2)
    loaded = load(shape, "bf16", plan([1]))

    with arenas_of(loaded.model) as arenas:
        blocks = os.fstat(arenas[0]).st_blocks
        model = _core.Runtime(plan([1]), **OPTIONS).adopt_model("m", shape, "bf16", arenas)
        model.prefault()
        assert os.fstat(arenas[0]).st_blocks == blocks and model.pool_bytes() == os.fstat(arenas[0]).st_size
    inode = {arena["fd"]: os.fstat(arena["fd"]).st_ino for arena in (*loaded.model.arenas(), *model.arenas())}
    assert len(set(inode.values())) == 1
    for fd in inode:
        os.close(fd)


def test_a_node_without_a_share_of_units_has_no_arena() -> None:
    shape = geometry(64, 64, experts=2, top_k=1)
    nodes = plan([1, 1])
    loaded = load(shape, "q8_0", nodes)
    with arenas_of(loaded.model) as arenas:
        assert len(arenas) == 1
        adopted = _core.Runtime(nodes, **OPTIONS).adopt_model("m", shape, "q8_0", arenas)
        assert adopted.node_bytes() == loaded.model.node_bytes()


def sealed(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.truncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, 0x10])
def test_unsealed_descriptors_are_refused(missing: int) -> None:
    runtime = _core.Runtime(plan([1]), **OPTIONS)
    size = runtime.plan_bytes(SHAPE, "bf16", plan([1]))[0]
    fd = sealed(size, ALL & ~missing)
    with pytest.raises(_core.CoreError, match="no sealed arena") as caught:
        runtime.adopt_model("m", SHAPE, "bf16", {0: fd})
    assert caught.value.code == "hardware" and os.fstat(fd).st_size == size, "the descriptor stays the caller's"
    os.close(fd)


def test_arenas_that_do_not_fit_are_refused() -> None:
    runtime = _core.Runtime(plan([1, 1]), **OPTIONS)
    one, two = (sealed(size, ALL) for size in runtime.plan_bytes(SHAPE, "bf16", plan([1, 1])))
    small, null = sealed(4096, ALL), os.open("/dev/null", os.O_RDONLY)
    before = descriptors()
    for arenas, text in (
        ({0: one}, "arena 1 of model m has 0 bytes"),
        ({}, "arena 0 of model m has 0 bytes"),
        ({0: one, 1: small}, "arena 1 of model m has 4096 bytes; wanted"),
        ({0: one, 1: two, 2: two}, "the plan has 2 nodes"),
        ({0: null, 1: two}, "no sealed arena"),
        ({0: 9999, 1: two}, "descriptor 9999"),
    ):
        with pytest.raises(_core.CoreError, match=text):
            runtime.adopt_model("m", SHAPE, "bf16", arenas)
    assert descriptors() == before
    for fd in (one, two, small, null):
        os.close(fd)


def test_arenas_are_handed_out_by_sealed_models_alone() -> None:
    runtime = _core.Runtime(plan([1]), **OPTIONS)
    model = runtime.create_model("m", SHAPE, "bf16")
    with pytest.raises(_core.CoreError, match="still being loaded"):
        model.arenas()
    model.fill_random(1)
    model.seal()
    with arenas_of(model) as arenas:
        assert not os.get_inheritable(arenas[0])
    runtime.drop_model(model)
    with pytest.raises(_core.CoreError, match="unloaded"):
        model.arenas()
    model.prefault()  # has nothing to do any more
