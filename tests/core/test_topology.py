"""hwloc's view as plain lists, on imaginary machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshaxd import _core


@given(nodes=st.integers(1, 8), cores=st.integers(1, 16), threads=st.integers(1, 4))
def test_synthetic_machines(nodes: int, cores: int, threads: int) -> None:
    seen = _core.topology(f"numa:{nodes} core:{cores} pu:{threads}")
    assert seen["source"] == "synthetic"
    assert [node["node"] for node in seen["nodes"]] == list(range(nodes))
    assert all(node["memory_bytes"] > 0 for node in seen["nodes"])
    cpus = [cpu for node in seen["nodes"] for core in node["cores"] for cpu in core]
    assert cpus == list(range(nodes * cores * threads))
    assert all(len(node["cores"]) == cores for node in seen["nodes"])
    assert all(len(core) == threads for node in seen["nodes"] for core in node["cores"])


def test_interleaved_cpu_numbers() -> None:
    """CPU numbers alternate over the nodes, as on many two-socket machines."""
    seen = _core.topology("numa:2 core:2 pu:2(indexes=0,4,2,6,1,5,3,7)")
    assert [node["cores"] for node in seen["nodes"]] == [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]


def test_nodes_that_share_cpus_give_each_core_to_the_larger() -> None:
    seen = _core.topology("package:2 [numa(memory=16GB)] [numa(memory=256GB)] core:3 pu:1")
    assert len(seen["nodes"]) == 4
    assert sum(len(node["cores"]) for node in seen["nodes"]) == 6
    for node in seen["nodes"]:
        assert len(node["cores"]) == (3 if node["memory_bytes"] > 64e9 else 0)


def test_a_machine_without_cores_shows_its_cpus() -> None:
    seen = _core.topology("numa:2 pu:3")
    assert [node["cores"] for node in seen["nodes"]] == [[[0], [1], [2]], [[3], [4], [5]]]


@pytest.mark.parametrize("text", ["gpu:2", "numa:0", "core", "numa:2 core:x pu:1"])
def test_nonsense_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(_core.CoreError, match=text) as caught:
        _core.topology(text)
    assert caught.value.code == "hardware"
    assert "numa:2" in caught.value.hint


def test_this_machine() -> None:
    seen = _core.topology()
    assert seen["source"] == "system"
    cpus = {cpu for node in seen["nodes"] for core in node["cores"] for cpu in core}
    assert os.sched_getaffinity(0) <= cpus
    numbers = {int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert {node["node"] for node in seen["nodes"]} == (numbers or {0})


def test_affinity_does_not_hide_cpus() -> None:
    before = os.sched_getaffinity(0)
    everything = _core.topology()
    try:
        os.sched_setaffinity(0, {min(before)})
        assert _core.topology() == everything
    finally:
        os.sched_setaffinity(0, before)
