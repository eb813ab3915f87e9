"""Which CPUs a worker's compute threads use beside the daemon's, as pure functions over sets of CPU numbers.

The daemon's threads and the worker's never compute at the same moment for one request, but with several workers they
do, and pinned threads that share a core halve each other. So a worker takes CPUs that the daemon does not, one for
each physical core, and shares only where nothing is left. Must not import vllm or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """`ranks[i]` are the CPUs of tensor-parallel rank i's threads, `process` those that all of the worker may run on;
    `shared`: they are the daemon's too."""

    ranks: tuple[tuple[int, ...], ...]
    process: tuple[int, ...]
    shared: bool

    @property
    def binding(self) -> str:
        """VLLM_CPU_OMP_THREADS_BIND's spelling: lists by rank, as in 0,2|4,6."""
        return "|".join(",".join(str(cpu) for cpu in rank) for rank in self.ranks)


def plan_cpus(cores: Sequence[Sequence[int]], allowed: Iterable[int], taken: Iterable[int], ranks: int) -> CpuPlan:
    """`cores`: sibling CPUs of each physical core in order; `allowed`: this process's affinity; `taken`: the daemon's.

    A core is free when none of its allowed CPUs is taken. Each rank gets an equal run of free cores, less one core
    that is left to the scheduler and the HTTP server where every rank still has one; where there are fewer free cores
    than ranks, all allowed cores are dealt out instead, several ranks on one core if need be.
    """
    allowed, taken = set(allowed), set(taken)
    usable = [[cpu for cpu in core if cpu in allowed] for core in cores]
    usable = [core for core in usable if core]
    free = [core for core in usable if not taken.intersection(core)]
    shared = len(free) < ranks
    cores = usable if shared else free
    pool = [core[0] for core in cores]
    if not shared and len(pool) > ranks:
        pool.pop()
    process = tuple(sorted(cpu for core in cores for cpu in core))
    return CpuPlan(tuple(_share(pool, rank, ranks) for rank in range(ranks)), process, shared)


def _share(pool: list[int], rank: int, ranks: int) -> tuple[int, ...]:
    if len(pool) < ranks:
        return (pool[rank % len(pool)],)
    first, end = rank * len(pool) // ranks, (rank + 1) * len(pool) // ranks
    return tuple(pool[first:end])


def online_cores(root: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """Sibling CPUs by physical core, as the kernel tells them; a CPU without topology is a core of its own."""
    cores: dict[int, list[int]] = {}
    for cpu in parse_list((root / "online").read_text()):
        siblings = root / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        group = parse_list(siblings.read_text()) if siblings.exists() else [cpu]
        cores.setdefault(min(group), []).append(cpu)
    return [cores[first] for first in sorted(cores)]


def parse_list(text: str) -> list[int]:
    """The kernel's lists: "0-2,5" is [0, 1, 2, 5]."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found
