"""The daemon on a machine with two NUMA nodes (emulated): memory and threads on their nodes, huge pages, limits; under
both hierarchies of control groups. inside_two_nodes.py collects, here it is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from box import install
from conftest import TinyModel

HUGE = 2 << 20
SMALL = {"num_hidden_layers": 2, "num_experts": 8, "hidden_size": 256, "moe_intermediate_size": 512}
BIG = {**SMALL, "num_experts": 80}
HIERARCHIES = {"v2": "", "v1": "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1"}


def weight_bytes(shape: dict[str, int]) -> int:
    """Of a model in bf16."""
    experts = shape["num_hidden_layers"] * shape["num_experts"]
    return experts * 3 * shape["hidden_size"] * shape["moe_intermediate_size"] * 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyModel]:
    """A layer with the package and the models."""
    layer = install(tmp_path_factory.mktemp("layer"))
    TinyModel(layer / "srv/models/big", BIG)
    return layer, TinyModel(layer / "srv/models/small", SMALL)


@pytest.fixture(scope="module", params=list(HIERARCHIES))
def facts(request: pytest.FixtureRequest, installed: tuple[Path, TinyModel], tmp_path_factory: Any) -> dict[str, Any]:
    """What was seen in one run of the machine."""
    layer, model = installed
    out = tmp_path_factory.mktemp(f"out-{request.param}")
    here = Path(__file__).parent
    environment = {"NUMAVM_LAYER": str(layer), "NUMAVM_OUT": str(out), "NUMAVM_APPEND": HIERARCHIES[request.param]}
    done = subprocess.run(
        [here / "numavm.sh", here / "inside_two_nodes.py"], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert model.check(out / "answers.npz") == 2
    seen: dict[str, Any] = json.loads((out / "facts.json").read_text())
    return {"hierarchy": request.param, **seen}


def cpus(text: str) -> set[int]:
    ranges = [part.partition("-") for part in text.split(",")]
    return {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}


pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_the_machine_is_what_was_asked_for(facts: dict[str, Any]) -> None:
    assert facts["cgroup"] == {"v2": "cgroup2fs", "v1": "tmpfs"}[facts["hierarchy"]]
    assert {node: cpus(text) for node, text in facts["cpus"].items()} == {"0": {0, 1}, "1": {2, 3}}


@pytest.mark.parametrize("pages", ["require", "auto"])
def test_each_node_holds_its_share_and_nothing_else(facts: dict[str, Any], pages: str) -> None:
    seen = facts[pages]
    assert seen["load"] == {"state": "ready", "reason": ""}
    held = {"0": 0, "1": 0}
    for arena in seen["arenas"]:
        ((node, size),) = arena["nodes"].items()
        assert arena["policy"] == f"bind:{node}"
        held[node] += size
    share = weight_bytes(SMALL) // 2
    for node in seen["nodes"]:
        assert node["share"] == pytest.approx(0.5)
        assert share <= held[str(node["node"])] < share + 2 * HUGE
        assert share <= node["pool_bytes"] < share + 2 * HUGE


def test_threads_stay_on_one_cpu_of_their_node(facts: dict[str, Any]) -> None:
    pinned = [cpus(row["cpus"]) for row in facts["auto"]["threads"]]
    assert {cpu for row in pinned if len(row) == 1 for cpu in row} == {0, 1, 2, 3}
    assert [sorted(node["cpus"]) for node in facts["auto"]["nodes"]] == [[0, 1], [2, 3]]


def test_reserved_huge_pages_are_used_on_both_nodes(facts: dict[str, Any]) -> None:
    assert {arena["page"] for arena in facts["require"]["arenas"]} == {HUGE}
    for node, free in facts["free_huge_pages"].items():
        taken = (free - facts["require"]["free_huge_pages"][node]) * HUGE
        assert taken == sum(arena["nodes"].get(node, 0) for arena in facts["require"]["arenas"]) > 0


def test_filled_memory_becomes_huge_pages_without_any_reserved(facts: dict[str, Any]) -> None:
    assert {arena["page"] for arena in facts["auto"]["arenas"]} == {4096}
    for arena in facts["auto"]["arenas"]:
        whole = sum(arena["nodes"].values()) // HUGE * HUGE
        assert whole > 0 and arena["transparent"] >= whole
    assert all(node["huge_bytes"] > 0 for node in facts["auto"]["nodes"])


def test_the_unit_can_be_bound_to_one_node(facts: dict[str, Any]) -> None:
    """CPUAffinity=numa with NUMAPolicy= and NUMAMask=, which old hierarchies know as well."""
    seen = facts["one_node"]
    assert [node["node"] for node in seen["nodes"]] == [1]
    assert seen["load"]["state"] == "ready"
    assert all(cpus(row["cpus"]) <= {2, 3} for row in seen["threads"])
    assert all(set(arena["nodes"]) == {"1"} for arena in seen["arenas"])


def test_a_load_beyond_the_memory_limit_is_refused_with_the_numbers(facts: dict[str, Any]) -> None:
    seen = facts["memory_limit"]
    assert seen["small"] == "ready" and seen["same_process"], "nothing was killed"
    refused = seen["big"]
    assert refused["state"] in ("refused", "failed")
    said = refused.get("message") or refused["reason"]
    assert "the control group may use 144" in said and f"{weight_bytes(BIG) >> 20}" in said, said


def test_the_memlock_limit_is_named_where_it_is_too_small(facts: dict[str, Any]) -> None:
    said = facts["memory_lock"]
    assert said["unlimited"] == "locked"
    assert "the memlock limit is 1048576 bytes" in said["limited"] and "LimitMEMLOCK=infinity" in said["limited"]
