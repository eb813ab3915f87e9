"""Every finding about the machine, on machines laid out in a directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from syshax.doctor import machine
from syshax.doctor.findings import exit_status
from syshax.doctor.snapshot import Snapshot, parse_units
from syshax.protocol import Check

GIB = 1 << 30
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {} {} bytes\n"
)
GOOD: dict[str, str] = {
    "proc/sys/kernel/osrelease": "6.6.0-72.0.0.64.oe2403.x86_64",
    "proc/self/limits": LIMITS.format("unlimited", "unlimited"),
    "proc/meminfo": "MemTotal: 16384 kB\nHugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
    "proc/sys/kernel/numa_balancing": "0",
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
}


def lay_out(root: Path, files: dict[str, str | None], **facts: Any) -> Snapshot:
    """A good machine with these files changed (None: absent)."""
    for name, text in (GOOD | files).items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    (root / "dev/shm").chmod(0o1777)
    return Snapshot(root=root, **{"shm": (8 * GIB, 16 * GIB), **facts})


def governor_of(cpu: int, driver: str, governor: str, preference: str | None = None) -> dict[str, str | None]:
    folder = f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
    return {
        f"{folder}/scaling_driver": driver,
        f"{folder}/scaling_governor": governor,
        f"{folder}/energy_performance_preference": preference,
    }


def found(snapshot: Snapshot) -> dict[str, Check]:
    checks = [*machine.check_machine(snapshot), *machine.memory_lock(snapshot)]
    return {check.name: check for check in checks if not check.ok}


def test_a_good_machine_is_good(tmp_path: Path) -> None:
    snapshot = lay_out(tmp_path, governor_of(0, "intel_pstate", "powersave", "performance"))
    checks = machine.check_machine(snapshot)
    assert exit_status(checks) == 0 and all(check.ok for check in checks), checks
    assert len({check.name for check in checks}) == len(machine.MACHINE_CHECKS)


@pytest.mark.parametrize(
    ("files", "name", "level", "says"),
    [
        ({"proc/sys/kernel/osrelease": "4.19.90"}, "kernel", "error", "older than 5.1"),
        ({"proc/sys/kernel/osrelease": None}, "kernel", "warning", "/proc is not readable"),
        ({"sys/fs/cgroup/cgroup.controllers": "cpu"}, "control groups", "warning", "the controllers cpuset, memory"),
        ({"proc/self/limits": LIMITS.format(8 << 20, 8 << 20), "dev/nvidia0": ""}, "memory lock", "warning", "8.00"),
        ({"proc/self/limits": LIMITS.format(65536, 65536), "dev/davinci3": ""}, "memory lock", "warning", "davinci3"),
        (
            {
                "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never]",
                "proc/sys/kernel/osrelease": "5.10.0-182.0.0.95.oe2203sp3",
            },
            "huge pages", "warning", "is never",
        ),
        ({"sys/kernel/mm/transparent_hugepage/shmem_enabled": None}, "huge pages", "warning", "is absent"),
        ({"sys/kernel/mm/transparent_hugepage/shmem_enabled": "never [deny]"}, "huge pages", "warning", "is deny"),
        ({"proc/sys/kernel/numa_balancing": "1"}, "NUMA balancing", "warning", "2 nodes"),
        (governor_of(1, "acpi-cpufreq", "powersave"), "CPU governor", "warning", "powersave on CPUs 1"),
        (governor_of(2, "intel_pstate", "powersave", "balance_power"), "CPU governor", "warning", "power on CPUs 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_alone_with_cost_and_fix(
    tmp_path: Path, files: dict[str, str | None], name: str, level: str, says: str
) -> None:
    faults = found(lay_out(tmp_path, files))
    assert set(faults) == {name}
    assert faults[name].level == level and says in faults[name].message
    assert faults[name].cost and faults[name].hint


@pytest.mark.parametrize(
    "files",
    [
        {"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never]"},
        {"proc/self/limits": LIMITS.format(8 << 20, 8 << 20)},
        {"proc/sys/kernel/numa_balancing": None},
        {"proc/sys/kernel/numa_balancing": "1", "sys/devices/system/node/node1/cpulist": None},
        {"sys/fs/cgroup/cgroup.controllers": None, "sys/fs/cgroup/memory/memory.limit_in_bytes": "1"},
        governor_of(0, "acpi-cpufreq", "schedutil"),
        governor_of(0, "acpi-cpufreq", "performance"),
    ],
)
def test_what_is_no_fault_here_is_none(tmp_path: Path, files: dict[str, str | None]) -> None:
    assert not found(lay_out(tmp_path, files))


def test_shared_memory_size_and_writers(tmp_path: Path) -> None:
    snapshot = lay_out(tmp_path, {})
    assert "64.0 MiB of 64.0 MiB" in found(replace(snapshot, shm=(64 << 20, 64 << 20)))["shared memory"].message
    assert found(replace(snapshot, shm=None))["shared memory"].level == "error"
    for mode, level in ((0o777, "error"), (0o755, "warning")):
        (tmp_path / "dev/shm").chmod(mode)
        assert (
            found(snapshot)["shared memory"].level == level
            and f"{mode:04o}" in found(snapshot)["shared memory"].message
        )


def test_no_control_group_and_nothing_readable(tmp_path: Path) -> None:
    checks = machine.check_machine(Snapshot(root=tmp_path))
    assert {"kernel", "control groups", "huge pages", "shared memory"} <= {c.name for c in checks if not c.ok}


def test_a_check_that_fails_hides_no_other(tmp_path: Path) -> None:
    snapshot = lay_out(tmp_path, governor_of(0, "acpi-cpufreq", "powersave"))
    (tmp_path / "sys/devices/system/cpu/cpuX").mkdir()
    (tmp_path / "sys/devices/system/cpu/cpu0").rename(tmp_path / "sys/devices/system/cpu/cpu0x")
    faults = found(snapshot)
    assert "could not be checked" in faults["governor"].message and len(faults) == 1


def test_units_as_systemctl_shows_them() -> None:
    text = "Id=syshaxd.service\nLoadState=loaded\nNRestarts=2\n\nId=syshaxd.socket\nLoadState=not-found\n"
    assert parse_units(text) == {
        "syshaxd.service": {"Id": "syshaxd.service", "LoadState": "loaded", "NRestarts": "2"},
        "syshaxd.socket": {"Id": "syshaxd.socket", "LoadState": "not-found"},
    }
    assert parse_units("") is None and parse_units("System has not been booted with systemd\n") is None
