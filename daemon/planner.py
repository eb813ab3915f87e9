"""The planner: topology + configuration + what the process may use -> which node runs how many threads on which CPUs.

Pure: no reading of the system, so every machine can be imagined in a test. It never gives less than was asked for in
silence: what cannot be had is refused with the reason, what was reduced by itself is a note in `Plan.notes`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syshax.errors import HardwareError
from syshaxd.config import ComputeConfig
from syshaxd.core import NodePlanDict
from syshaxd.machine import Machine
from syshaxd.quantities import format_cpus


@dataclass(frozen=True)
class PlannedNode:
    """One node's part: its number in the system, its threads' CPUs, its part of every expert."""

    node: int
    cpus: tuple[int, ...]
    share: float
    memory_bytes: int
    bind: bool
    """False on a machine with one node, where binding memory could only fail."""

    def as_core_plan(self) -> NodePlanDict:
        return {
            "node": self.node if self.bind else -1,
            "cpus": list(self.cpus),
            "threads": len(self.cpus),
            "share": self.share,
        }


@dataclass(frozen=True)
class Plan:
    nodes: tuple[PlannedNode, ...]
    spin_us: int
    allowed_cpus: tuple[int, ...]
    quota_cpus: float | None
    notes: tuple[str, ...] = ()
    """What differs from the machine's or the configuration's full measure, for logs and status."""

    def gone_cpus(self) -> frozenset[int]:
        """Those of the plan that went offline, or out of this process's set, after it was made."""
        return self.cpus - os.sched_getaffinity(0)

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for node in self.nodes for cpu in node.cpus)

    @property
    def threads(self) -> int:
        return sum(len(node.cpus) for node in self.nodes)


def make_plan(topology: Mapping[str, Any], compute: ComputeConfig, machine: Machine) -> Plan:
    """Raises HardwareError for nodes, CPUs, threads and shares that this machine cannot give."""
    usable = _usable_cpus(topology, compute, machine)
    ordered = {int(node["node"]): _physical_first(node["cores"], usable) for node in topology["nodes"]}
    names, notes = _choose_nodes(ordered, compute, usable)
    total, quota_notes = _thread_count(compute, sum(len(ordered[name]) for name in names), machine.quota_cpus)
    names, fewer_notes = _drop_nodes_without_threads(names, total, compute)
    counts = _divide(total, [len(ordered[name]) for name in names])
    shares = _shares(compute, names, counts)
    memory = {int(node["node"]): int(node["memory_bytes"]) for node in topology["nodes"]}
    nodes = tuple(
        PlannedNode(name, tuple(ordered[name][:count]), share, memory[name], bind=len(ordered) > 1)
        for name, count, share in zip(names, counts, shares, strict=True)
    )
    spin_us = compute.spin_us if machine.quota_cpus is None else 0
    allowed = tuple(sorted(machine.allowed_cpus))
    return Plan(nodes, spin_us, allowed, machine.quota_cpus, (*notes, *quota_notes, *fewer_notes))


def _usable_cpus(topology: Mapping[str, Any], compute: ComputeConfig, machine: Machine) -> frozenset[int]:
    present = {cpu for node in topology["nodes"] for core in node["cores"] for cpu in core}
    wanted = frozenset(compute.cpus)
    if missing := wanted - present:
        raise HardwareError(
            f"compute.cpus names CPUs {format_cpus(missing)}, this machine has {format_cpus(present)}",
            "`syshaxctl topology` or `lscpu -e` list them",
        )
    allowed = format_cpus(machine.allowed_cpus)
    if outside := wanted - machine.allowed_cpus:
        raise HardwareError(
            f"compute.cpus names CPUs {format_cpus(outside)}, but this process may use {allowed}",
            "the affinity or cpuset of the service is narrower: see AllowedCPUs= and CPUAffinity= of the unit",
        )
    usable = (wanted or machine.allowed_cpus) & present
    if not usable:
        raise HardwareError(
            f"no CPU can be used: the machine has {format_cpus(present)}, the process may use {allowed}"
        )
    return frozenset(usable)


def _physical_first(cores: Sequence[Sequence[int]], usable: frozenset[int]) -> list[int]:
    """Usable CPUs of a node: one of every core, then the second ones, and so on."""
    left = [[cpu for cpu in core if cpu in usable] for core in cores]
    depth = max((len(core) for core in left), default=0)
    return [core[level] for level in range(depth) for core in left if level < len(core)]


def _choose_nodes(
    ordered: Mapping[int, list[int]], compute: ComputeConfig, usable: frozenset[int]
) -> tuple[list[int], list[str]]:
    known = ", ".join(str(node) for node in ordered)
    for node in compute.nodes:
        if node not in ordered:
            near = difflib.get_close_matches(str(node), [str(name) for name in ordered], 1)
            hint = f"did you mean {near[0]}?" if near else "`syshaxctl topology` or `numactl -H` list them"
            raise HardwareError(f"compute.nodes names node {node}; this machine's nodes are {known}", hint)
        if not ordered[node]:
            raise HardwareError(
                f"compute.nodes names node {node}, which has none of the CPUs that may be used ({format_cpus(usable)})",
                f"nodes with such CPUs: {', '.join(str(name) for name, cpus in ordered.items() if cpus)}",
            )
    if compute.nodes:
        return list(compute.nodes), []
    idle = [str(node) for node, cpus in ordered.items() if not cpus]
    notes = [f"node {', '.join(idle)} is not used: none of its CPUs may be used"] if idle else []
    return [node for node, cpus in ordered.items() if cpus], notes


def _thread_count(compute: ComputeConfig, cpus: int, quota: float | None) -> tuple[int, list[str]]:
    by_quota = max(1, int(quota)) if quota is not None else cpus
    most = min(cpus, by_quota)
    if compute.threads > most:
        bound = f"{cpus} CPUs that may be used" if cpus <= by_quota else f"CPU quota of {quota:g} CPUs"
        raise HardwareError(
            f"compute.threads = {compute.threads} is more than the {bound}",
            "0 takes as many as there are; or widen affinity, cpuset or quota of the service",
        )
    if compute.threads == 0 and by_quota < cpus:
        return most, [f"{most} of {cpus} CPUs are used: the CPU quota is {quota:g} CPUs"]
    return compute.threads or most, []


def _drop_nodes_without_threads(names: list[int], threads: int, compute: ComputeConfig) -> tuple[list[int], list[str]]:
    if threads >= len(names):
        return names, []
    if compute.nodes or compute.shares:
        raise HardwareError(
            f"{threads} threads cannot serve {len(names)} nodes ({', '.join(map(str, names))}): each needs one",
            "name fewer nodes in compute.nodes, or raise compute.threads or the CPU quota",
        )
    dropped = ", ".join(map(str, names[threads:]))
    return names[:threads], [f"node {dropped} is not used: there are {threads} threads for {len(names)} nodes"]


def _divide(total: int, capacity: list[int]) -> list[int]:
    """`total` in proportion to the capacities: at least 1 and at most its capacity each (largest remainder)."""
    counts = [1] * len(capacity)
    whole = sum(capacity)
    while sum(counts) < total:
        open_nodes = [node for node, count in enumerate(counts) if count < capacity[node]]
        counts[max(open_nodes, key=lambda node: total * capacity[node] / whole - counts[node])] += 1
    return counts


def _shares(compute: ComputeConfig, names: list[int], counts: list[int]) -> list[float]:
    if compute.shares and len(compute.shares) != len(names):
        raise HardwareError(
            f"compute.shares has {len(compute.shares)} numbers for {len(names)} nodes ({', '.join(map(str, names))})",
            "give one number for each node in use, or none",
        )
    weights = list(compute.shares) or [float(count) for count in counts]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def client_spin_us(plan: Plan, client_cpus: frozenset[int]) -> int:
    """How long a client may spin for an answer: not at all where it would take CPU time from the threads it waits for.

    Unknown CPUs (an empty set) count as shared.
    """
    if not client_cpus or client_cpus & plan.cpus or plan.quota_cpus is not None:
        return 0
    return plan.spin_us
