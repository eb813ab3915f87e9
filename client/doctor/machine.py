"""Checks of the machine: kernel, control groups, huge pages, NUMA balancing, governor, /dev/shm.

Owns the rules; each is a function of a Snapshot alone. The daemon runs them where it lives (its view of the machine is
the one that counts), syshaxctl where no daemon answers.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator

from syshax.ctl.units import cpu_ranges, size
from syshax.doctor.findings import error, fine, run_all, warning
from syshax.doctor.snapshot import Snapshot
from syshax.protocol import Check

_SEALING, _POPULATE, _COLLAPSE = (5, 1), (5, 14), (6, 1)
_SMALL_SHM = 1 << 30
_SHMEM_THP = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_ACCELERATORS = ("nvidia[0-9]*", "davinci[0-9]*", "mxcd*")
_SLOW_GOVERNORS = ("powersave", "conservative", "ondemand", "userspace")
_SAVING = ("power", "balance_power")


def check_machine(snapshot: Snapshot) -> list[Check]:
    return run_all(MACHINE_CHECKS, snapshot)


def kernel_version(snapshot: Snapshot) -> tuple[int, int]:
    """(0, 0) where it is not known."""
    match = re.match(r"(\d+)\.(\d+)", snapshot.text("proc/sys/kernel/osrelease") or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def kernel(snapshot: Snapshot) -> Iterator[Check]:
    release, version = snapshot.text("proc/sys/kernel/osrelease"), kernel_version(snapshot)
    if release is None:
        yield warning("kernel", "/proc is not readable", "nothing else can be checked", "mount -t proc proc /proc")
    elif version < _SEALING:
        yield error(
            "kernel",
            f"{release} is older than 5.1: memory cannot be sealed (F_SEAL_FUTURE_WRITE)",
            "no model can be loaded",
            "dnf upgrade kernel && reboot",
        )
    else:
        old = "" if version >= _POPULATE else "; older than 5.14: memory is reserved with fallocate"
        yield fine("kernel", f"{release}{old}")


def control_groups(snapshot: Snapshot) -> Iterator[Check]:
    if (snapshot.root / "sys/fs/cgroup/cgroup.controllers").exists():
        controllers = (snapshot.text("sys/fs/cgroup/cgroup.controllers") or "").split()
        missing = [name for name in ("cpu", "cpuset", "memory") if name not in controllers]
        if missing:
            yield warning(
                "control groups",
                f"v2 without the controllers {', '.join(missing)}",
                "limits of the units that need them (CPUQuota=, AllowedCPUs=, MemoryMax=) do not hold",
                'grubby --update-kernel=ALL --remove-args="cgroup_disable" && reboot',
            )
        else:
            yield fine("control groups", "v2")
    elif (snapshot.root / "sys/fs/cgroup").is_dir():
        yield fine(
            "control groups", "v1: AllowedCPUs= and AllowedMemoryNodes= do nothing; use CPUAffinity= and NUMAMask="
        )
    else:
        yield warning("control groups", "none is mounted", "units' limits do not hold", "mount | grep cgroup")


def memory_lock(snapshot: Snapshot) -> Iterator[Check]:
    """Of the caller: the daemon locks nothing and sees no devices; workers with an accelerator lock their rings."""
    line = next(
        (
            line
            for line in (snapshot.text("proc/self/limits") or "").splitlines()
            if line.startswith("Max locked memory")
        ),
        "",
    )
    words = line.removeprefix("Max locked memory").split()
    limit = words[0] if words else "unknown"
    text = f"limit {size(int(limit))} here" if limit.isdigit() else f"limit {limit} here"
    devices = [path.name for pattern in _ACCELERATORS for path in sorted((snapshot.root / "dev").glob(pattern))]
    if devices and limit.isdigit() and int(limit) < _SMALL_SHM:
        yield warning(
            "memory lock",
            f"{text}, and this machine has an accelerator ({devices[0]})",
            "a worker's ring cannot be page-locked: every copy goes through a second buffer",
            "in a shell: ulimit -l unlimited; units: LimitMEMLOCK=infinity, as syshax-worker@.service has it",
        )
    else:
        yield fine("memory lock", f"{text} (the daemon locks nothing; workers with an accelerator lock their rings)")


def huge_pages(snapshot: Snapshot) -> Iterator[Check]:
    """For compute.huge_pages = "auto": whether shared memory can have transparent ones."""
    setting = (snapshot.text(_SHMEM_THP) or "").partition("[")[2].partition("]")[0] or "absent"
    reserved = snapshot.meminfo()
    pool = reserved.get("HugePages_Total", 0) * reserved.get("Hugepagesize", 0)
    free = reserved.get("HugePages_Free", 0) * reserved.get("Hugepagesize", 0)
    more = f"; {size(free)} of {size(pool)} reserved ones are free" if pool else ""
    if setting in ("advise", "always", "within_size", "force"):
        yield fine("huge pages", f"transparent ones for shared memory: {setting}{more}")
    elif setting == "never" and kernel_version(snapshot) >= _COLLAPSE:
        yield fine("huge pages", f"this kernel makes them of filled memory (MADV_COLLAPSE){more}")
    else:
        yield warning(
            "huge pages",
            f"/{_SHMEM_THP} is {setting}{more}",
            "weights lie in 4 KiB pages: more misses of the address cache in every product",
            f"echo advise > /{_SHMEM_THP}, then load the models again",
        )


def numa_balancing(snapshot: Snapshot) -> Iterator[Check]:
    value, nodes = snapshot.text("proc/sys/kernel/numa_balancing"), snapshot.nodes()
    if value not in (None, "0") and nodes > 1:
        yield warning(
            "NUMA balancing",
            f"on, with {nodes} nodes",
            "the kernel unmaps pages to watch who uses them; weights are bound and gain nothing from it",
            "sysctl -w kernel.numa_balancing=0 (to keep it: a file in /etc/sysctl.d)",
        )
    else:
        yield fine("NUMA balancing", "off" if value in (None, "0") else "on, and there is one node alone")


def governor(snapshot: Snapshot) -> Iterator[Check]:
    """Drivers with a hardware governor of their own are told by the energy preference, the others by the governor."""
    slow: Counter[str] = Counter()
    cpus: list[int] = []
    seen: set[str] = set()
    for folder in (snapshot.root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        name = folder.relative_to(snapshot.root).as_posix()
        driver, chosen = snapshot.text(f"{name}/scaling_driver") or "", snapshot.text(f"{name}/scaling_governor") or ""
        preference = snapshot.text(f"{name}/energy_performance_preference")
        own = preference is not None and driver in ("intel_pstate", "amd-pstate-epp")
        setting = f"{chosen}/{preference}" if own else chosen
        seen.add(setting)
        if preference in _SAVING if own else chosen in _SLOW_GOVERNORS:
            slow[setting] += 1
            cpus.append(int(folder.parent.name.removeprefix("cpu")))
    if slow:
        yield warning(
            "CPU governor",
            f"{slow.most_common(1)[0][0]} on CPUs {cpu_ranges(sorted(cpus))}",
            "cores reach their clock late or never: short requests wait for it",
            "cpupower frequency-set -g performance",
        )
    else:
        yield fine("CPU governor", ", ".join(sorted(seen)) or "the machine (or its host) sets the clock itself")


def shared_memory(snapshot: Snapshot) -> Iterator[Check]:
    name = "shared memory"
    if snapshot.shm is None:
        yield error(name, "there is no /dev/shm", "no worker can attach", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
        return
    free, total = snapshot.shm
    text = f"/dev/shm has {size(free)} of {size(total)} free"
    if free < _SMALL_SHM:
        yield warning(
            name,
            text,
            "sessions with large batches are refused: their rings lie there",
            "mount -o remount,size=50% /dev/shm; for a container: --shm-size",
        )
    else:
        yield fine(name, text)
    yield from _shared_memory_writers(snapshot)


def _shared_memory_writers(snapshot: Snapshot) -> Iterator[Check]:
    try:
        mode = stat.S_IMODE((snapshot.root / "dev/shm").stat().st_mode)
    except OSError:
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield error(
            "shared memory",
            f"/dev/shm has the mode {mode:04o}: anybody may remove or replace others' objects in it",
            "other programs' shared memory is not safe (the daemon's own has no name there)",
            "chmod 1777 /dev/shm",
        )
    elif not mode & stat.S_IWOTH:
        yield warning(
            "shared memory",
            f"/dev/shm has the mode {mode:04o}: not every user may write there",
            "a daemon that runs as syshax cannot make sessions' rings",
            "chmod 1777 /dev/shm",
        )


MACHINE_CHECKS: tuple[Callable[[Snapshot], Iterator[Check]], ...] = (
    kernel,
    control_groups,
    huge_pages,
    numa_balancing,
    governor,
    shared_memory,
)
