"""The planner on imaginary machines: nodes in any subset and order, quotas, SMT, refusals; the readings behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import HardwareError
from syshaxd.config import ComputeConfig
from syshaxd.machine import Machine, cpu_quota, meminfo, memory_group_limit, process_is_stopped
from syshaxd.planner import Plan, client_spin_us, make_plan


def machine_of(nodes: int, cores: int, siblings: int = 1, interleaved: bool = False) -> dict[str, Any]:
    """CPU numbers as Linux gives them: first threads of all cores, then the second ones; or node by turns."""
    total = nodes * cores

    def cpu(node: int, core: int, sibling: int) -> int:
        first = core * nodes + node if interleaved else node * cores + core
        return first + sibling * total

    return {
        "source": "test",
        "nodes": [
            {
                "node": node,
                "memory_bytes": 1 << 36,
                "cores": [[cpu(node, core, sibling) for sibling in range(siblings)] for core in range(cores)],
            }
            for node in range(nodes)
        ],
    }


def plan_of(
    topology: dict[str, Any], allowed: set[int] | None = None, quota: float | None = None, **compute: Any
) -> Plan:
    everything = {cpu for node in topology["nodes"] for core in node["cores"] for cpu in core}
    return make_plan(topology, ComputeConfig(**compute), Machine(frozenset(allowed or everything), quota))


@pytest.mark.parametrize(
    ("topology", "arguments", "expected"),
    [
        (machine_of(1, 4), {}, [(0, (0, 1, 2, 3))]),
        (machine_of(1, 2, 2), {}, [(0, (0, 1, 2, 3))]),
        (machine_of(1, 4, 2), {"compute": {"threads": 4}}, [(0, (0, 1, 2, 3))]),
        (machine_of(1, 4, 2), {"compute": {"threads": 5}}, [(0, (0, 1, 2, 3, 4))]),
        (machine_of(1, 4, 2), {"allowed": {0, 4, 1, 5}, "compute": {"threads": 2}}, [(0, (0, 1))]),
        (machine_of(2, 2), {}, [(0, (0, 1)), (1, (2, 3))]),
        (machine_of(2, 2, interleaved=True), {}, [(0, (0, 2)), (1, (1, 3))]),
        (machine_of(4, 2), {"compute": {"nodes": [3, 1]}}, [(3, (6, 7)), (1, (2, 3))]),
        (machine_of(4, 2), {"allowed": {0, 1, 4}}, [(0, (0, 1)), (2, (4,))]),
        (machine_of(4, 2), {"quota": 5.5}, [(0, (0, 1)), (1, (2,)), (2, (4,)), (3, (6,))]),
        (machine_of(4, 2), {"quota": 2.9}, [(0, (0,)), (1, (2,))]),
        (machine_of(2, 4), {"quota": 0.5}, [(0, (0,))]),
        (machine_of(2, 4), {"compute": {"cpus": (1, 5, 6)}}, [(0, (1,)), (1, (5, 6))]),
        (machine_of(2, 4), {"compute": {"threads": 3}}, [(0, (0, 1)), (1, (4,))]),
    ],
)
def test_plans(
    topology: dict[str, Any], arguments: dict[str, Any], expected: list[tuple[int, tuple[int, ...]]]
) -> None:
    plan = plan_of(topology, arguments.get("allowed"), arguments.get("quota"), **arguments.get("compute", {}))
    assert [(node.node, node.cpus) for node in plan.nodes] == expected
    assert sum(node.share for node in plan.nodes) == pytest.approx(1)
    assert [node.as_core_plan()["node"] for node in plan.nodes] == [
        node if len(topology["nodes"]) > 1 else -1 for node, _ in expected
    ]


@pytest.mark.parametrize(
    ("compute", "arguments", "words"),
    [
        ({"nodes": [2]}, {}, "names node 2; this machine's nodes are 0, 1"),
        ({"nodes": [1]}, {"allowed": {0, 1}}, "none of the CPUs that may be used"),
        ({"cpus": (9,)}, {}, "names CPUs 9, this machine has 0-3"),
        ({"cpus": (2, 3)}, {"allowed": {0, 1}}, "names CPUs 2-3, but this process may use 0-1"),
        ({"threads": 5}, {}, "more than the 4 CPUs"),
        ({"threads": 3}, {"allowed": {0, 1}}, "more than the 2 CPUs"),
        ({"threads": 3}, {"quota": 2.0}, "CPU quota of 2 CPUs"),
        ({"shares": (1.0,)}, {}, "1 numbers for 2 nodes"),
        ({"nodes": [0, 1], "threads": 1}, {}, "1 threads cannot serve 2 nodes"),
        ({}, {"allowed": {77}}, "no CPU can be used"),
    ],
)
def test_what_cannot_be_had_is_refused(compute: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(HardwareError, match=words) as caught:
        plan_of(machine_of(2, 2), **arguments, **compute)
    assert caught.value.hint or "no CPU" in caught.value.message


def test_less_than_the_machine_is_noted_and_shares_are_taken() -> None:
    assert "CPU quota is 3 CPUs" in plan_of(machine_of(2, 2), quota=3.0).notes[0]
    assert "node 1 is not used" in plan_of(machine_of(2, 2), {0, 1}).notes[0]
    assert plan_of(machine_of(2, 2)).notes == ()
    shares = [node.share for node in plan_of(machine_of(2, 2), shares=(1.0, 3.0)).nodes]
    assert shares == [0.25, 0.75]


def test_memory_only_nodes_are_left_out() -> None:
    topology = machine_of(1, 2)
    topology["nodes"].append({"node": 1, "memory_bytes": 1 << 40, "cores": []})
    assert [node.node for node in plan_of(topology).nodes] == [0]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 2), st.booleans(), st.data())
def test_every_plan_keeps_the_rules(
    nodes: int, cores: int, siblings: int, interleaved: bool, data: st.DataObject
) -> None:
    topology = machine_of(nodes, cores, siblings, interleaved)
    everything = {cpu for node in topology["nodes"] for core in node["cores"] for cpu in core}
    allowed = data.draw(st.sets(st.sampled_from(sorted(everything)), min_size=1))
    quota = data.draw(st.none() | st.floats(0.1, 40))
    threads = data.draw(st.integers(0, len(allowed)))
    try:
        plan = plan_of(topology, allowed, quota, threads=threads)
    except HardwareError:
        assert quota is not None and threads > max(1, int(quota))
        return
    cpus = [cpu for node in plan.nodes for cpu in node.cpus]
    assert len(set(cpus)) == len(cpus) == plan.threads and set(cpus) <= allowed
    assert all(node.cpus for node in plan.nodes)
    most = len(allowed) if quota is None else min(len(allowed), max(1, int(quota)))
    assert plan.threads == (threads or most)
    for node in plan.nodes:
        rows = [[cpu for cpu in core if cpu in allowed] for core in topology["nodes"][node.node]["cores"]]
        used = [sum(cpu in node.cpus for cpu in row) for row in rows]
        for row, count in zip(rows, used, strict=True):
            assert count >= min(len(row), max(used) - 1), "second threads of a core only when all first ones are used"


def test_clients_spin_only_on_cpus_of_their_own() -> None:
    topology = machine_of(1, 4)
    plan = plan_of(topology, cpus=(0, 1))
    assert client_spin_us(plan, frozenset({2, 3})) == ComputeConfig().spin_us > 0
    assert client_spin_us(plan, frozenset({1, 2})) == 0
    assert client_spin_us(plan, frozenset()) == 0
    throttled = plan_of(topology, quota=2.0)
    assert throttled.spin_us == 0 and client_spin_us(throttled, frozenset({9})) == 0


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cgroup.procs": ""}
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"
V1 = {"proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x/y\n", "sys/fs/cgroup/cpu,cpuacct/x/y/tasks": ""}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 50000"}, 4.0),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "300000 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2.0),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({**V1, "sys/fs/cgroup/cpu,cpuacct/x/y/cpu.cfs_quota_us": "-1"}, None),
        (V1 | {f"{V1_CPU}/x/y/cpu.cfs_quota_us": "250000", f"{V1_CPU}/x/y/cpu.cfs_period_us": "100000"}, 2.5),
        (V1 | {f"{V1_CPU}/x/cpu.cfs_quota_us": "100000", f"{V1_CPU}/x/cpu.cfs_period_us": "50000"}, 2.0),
        ({}, None),
    ],
)  # fmt: skip
def test_cpu_quota_of_both_hierarchies_up_to_the_root(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(lay_out(tmp_path, files)) == quota


def test_the_memory_group_leaves_page_cache_out(tmp_path: Path) -> None:
    group = {
        "memory.max": "1000",
        "memory.current": "600",
        "memory.stat": "anon 1\ninactive_file 100\nactive_file 50\n",
    }
    root = lay_out(tmp_path, V2 | {f"sys/fs/cgroup/a/b/{name}": text for name, text in group.items()})
    assert memory_group_limit(root) == (1000, 450)
    assert memory_group_limit(lay_out(tmp_path / "none", V2)) is None


def test_small_readings(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable:   12 kB\nHugePages_Free:  3\n",
        "proc/5/stat": "5 (a) (b) T 1 1",
        "proc/6/stat": "6 (x) S 1",
    }
    root = lay_out(tmp_path, files)
    assert meminfo(root) == {"MemAvailable": 12288, "HugePages_Free": 3}
    assert [process_is_stopped(pid, root) for pid in (5, 6, 7, 0)] == [True, False, False, False]
