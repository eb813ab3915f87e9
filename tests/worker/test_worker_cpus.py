"""The worker's CPUs, for machines of any shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshax.vllm.cpus import CpuPlan, online_cores, parse_list, plan_cpus


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[list[int]], set[int], set[int], int]:
    threads = draw(st.integers(1, 4))
    cores = draw(st.integers(1, 12))
    topology = [[core + cores * thread for thread in range(threads)] for core in range(cores)]
    every = [cpu for core in topology for cpu in core]
    allowed = draw(st.sets(st.sampled_from(every), min_size=1))
    taken = draw(st.sets(st.sampled_from(every)))
    return topology, allowed, taken, draw(st.integers(1, 6))


@given(machines())
def test_ranks_keep_off_the_daemon_where_cores_are_left(
    machine: tuple[list[list[int]], set[int], set[int], int],
) -> None:
    topology, allowed, taken, ranks = machine
    plan = plan_cpus(topology, allowed, taken, ranks)
    assert len(plan.ranks) == ranks
    used = [cpu for rank in plan.ranks for cpu in rank]
    assert all(plan.ranks), "every rank has a CPU"
    assert set(used) <= set(plan.process) <= allowed
    core_of = {cpu: tuple(core) for core in topology for cpu in core}
    free = [core for core in topology if set(core) & allowed and not set(core) & allowed & taken]
    assert plan.shared == (len(free) < ranks)
    if not plan.shared:
        assert not set(plan.process) & taken
        assert len({core_of[cpu] for cpu in used}) == len(used), "one thread on a core, no core twice"
    assert plan.binding.count("|") == ranks - 1


def test_two_cores_all_taken_are_shared_whole() -> None:
    assert plan_cpus([[0], [1]], {0, 1}, {0, 1}, 1) == CpuPlan(((0, 1),), (0, 1), True)
    assert plan_cpus([[0], [1]], {0, 1}, {0, 1}, 2).binding == "0|1"
    assert plan_cpus([[0], [1]], {0, 1}, {0, 1}, 3).ranks == ((0,), (1,), (0,))


def test_one_core_is_left_to_the_server() -> None:
    cores = [[core, core + 8] for core in range(8)]
    plan = plan_cpus(cores, set(range(16)), {0, 1, 2, 3}, 1)
    assert plan.ranks == ((4, 5, 6),)
    assert plan.process == (4, 5, 6, 7, 12, 13, 14, 15)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,8\n", [0, 1, 8]), ("", []), ("5,2-3", [5, 2, 3])]
)
def test_the_kernels_lists(text: str, cpus: list[int]) -> None:
    assert parse_list(text) == cpus


def test_cores_are_read_from_sysfs(tmp_path: Path) -> None:
    (tmp_path / "online").write_text("0-4\n")
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}.items():
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings)
    assert online_cores(tmp_path) == [[0, 2], [1, 3], [4]]
