"""The ring's benchmark: figures that make sense on separate and on shared CPUs, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ring_harness import descriptors

from syshaxd import _core

CPUS = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("client_cpu", "daemon_cpu"), [(-1, -1), (CPUS[0], CPUS[-1]), (CPUS[0], CPUS[0])], ids=["free", "two", "one"]
)
@pytest.mark.parametrize("payload_bytes", [4, 16384])
def test_figures(client_cpu: int, daemon_cpu: int, payload_bytes: int) -> None:
    before, affinity = descriptors(), os.sched_getaffinity(0)
    figures = _core.bench_ring(0.4, payload_bytes, client_cpu, daemon_cpu)
    assert figures.keys() == {"spin_us_p50", "spin_us_p99", "parked_us_p50", "floor_spin_us", "floor_parked_us"}
    assert figures["floor_spin_us"] > 0 and 0 < figures["spin_us_p50"] <= figures["spin_us_p99"]
    assert figures["floor_parked_us"] > 0 and 0 < figures["parked_us_p50"] < 1e6
    assert descriptors() == before and os.sched_getaffinity(0) == affinity
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_nonsense_is_refused(seconds: float) -> None:
    with pytest.raises(_core.CoreError, match="seconds"):
        _core.bench_ring(seconds, 4, -1, -1)


def test_the_command() -> None:
    """The promised figures as JSON, a table for people; a CPU that may not be used is refused in words."""
    command = [sys.executable, "-m", "syshaxd", "bench", "ring", "--seconds", "0.1"]
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert {"spin_us_p50", "spin_us_p99", "parked_us_p50"} <= json.loads(ran.stdout).keys()
    assert "floor_parked_us" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    refused = subprocess.run([*command, "--client-cpu", "4095"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "CPU 4095" in refused.stderr and "hint: allowed are" in refused.stderr
