"""What the operating system grants this process: CPUs, CPU quota, memory; read from /proc and /sys.

Owns these readings, so that the planner and the loader can be pure. Every function takes `root`, so that tests can lay
out a machine in a directory. Nothing is cached: limits of a control group change while we run.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a huge number."""


@dataclass(frozen=True)
class Machine:
    """One reading, as the planner wants it."""

    allowed_cpus: frozenset[int]
    quota_cpus: float | None

    @classmethod
    def read(cls, root: Path = ROOT) -> Machine:
        return cls(frozenset(os.sched_getaffinity(0)), cpu_quota(root))


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _group_folders(controller: str, root: Path) -> list[tuple[int, Path]]:
    """(cgroup version, folder) of this process's group and all above it, for both hierarchies.

    In a container the path may name what the host sees; then the mount's root is the group.
    """
    found: list[tuple[int, Path]] = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mounts = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"]
        else:
            continue
        for mount in (root / name for name in mounts):
            folder = mount / path.strip("/")
            while folder.is_relative_to(mount):
                if folder.is_dir():
                    found.append((version, folder))
                if folder == mount:
                    break
                folder = folder.parent
    return found


def cpu_quota(root: Path = ROOT) -> float | None:
    """The tightest CPU bandwidth limit over the control group and its parents, in CPUs; None: there is none."""
    limits: list[float] = []
    for version, folder in _group_folders("cpu", root):
        if version == 2:
            quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "100000"
        if quota.isdigit() and int(quota) > 0 and (period or "100000").isdigit():
            limits.append(int(quota) / max(1, int(period or "100000")))
    return min(limits, default=None)


def memory_group_limit(root: Path = ROOT) -> tuple[int, int] | None:
    """(limit, bytes in use that cannot be reclaimed) of the tightest memory control group; None: no limit."""
    groups: list[tuple[int, int]] = []
    for version, folder in _group_folders("memory", root):
        limit = _text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")) or "max"
        usage = _text(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or "0"
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            groups.append((int(limit), max(0, int(usage) - _file_cache(folder))))
    return min(groups, key=lambda group: group[0] - group[1], default=None)


def _file_cache(folder: Path) -> int:
    """Page cache charged to a group: the kernel gives it up before the limit hurts. Shared memory does not count."""
    values: dict[str, int] = {}
    for line in (_text(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        values[name] = int(value)
    prefix = "total_" if "total_inactive_file" in values else ""
    return sum(values.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes (counts, such as HugePages_Free, as they are)."""
    values: dict[str, int] = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def process_is_stopped(pid: int, root: Path = ROOT) -> bool:
    """True for a process that stands still: stopped, traced or dead. Unknown processes are not."""
    stat = _text(root / f"proc/{pid}/stat")
    if pid <= 0 or stat is None:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t", "Z", "X")


def shm_free_bytes(folder: Path = ROOT / "dev/shm") -> tuple[int, int]:
    """(free, size) of the file system that POSIX shared memory comes from."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def raise_open_files_limit() -> int:
    """Takes all the open files that the process may have (a session needs four); gives the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
