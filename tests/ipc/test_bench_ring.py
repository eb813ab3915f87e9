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
from syshaxd.bench import idling, ring, spinning

CPUS = sorted(os.sched_getaffinity(0))


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.mark.parametrize(
    ("client_cpu", "daemon_cpu"), [(-1, -1), (CPUS[0], CPUS[-1]), (CPUS[0], CPUS[0])], ids=["free", "two", "one"]
)
@pytest.mark.parametrize("payload_bytes", [4, 16384])
def test_figures(client_cpu: int, daemon_cpu: int, payload_bytes: int) -> None:
    before, affinity = (descriptors(), children()), os.sched_getaffinity(0)
    figures = _core.bench_ring(0.4, payload_bytes, client_cpu, daemon_cpu)
    assert figures.keys() == {"spin_us_p50", "spin_us_p99", "parked_us_p50", "floor_spin_us", "floor_parked_us"}
    assert figures["floor_spin_us"] > 0 and 0 < figures["spin_us_p50"] <= figures["spin_us_p99"]
    assert figures["floor_parked_us"] > 0 and 0 < figures["parked_us_p50"] < 1e6
    assert (descriptors(), children()) == before and os.sched_getaffinity(0) == affinity


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_nonsense_is_refused(seconds: float) -> None:
    with pytest.raises(_core.CoreError, match="seconds"):
        _core.bench_ring(seconds, 4, -1, -1)


COMMAND = [sys.executable, "-m", "syshaxd", "bench", "ring"]


def test_the_command() -> None:
    """The promised figures as JSON, a table and a last line for people; the exit status says whether all is met."""
    options = ["--seconds", "0.1", "--parts", "latency"]
    ran = subprocess.run([*COMMAND, *options, "--json"], capture_output=True, text=True, check=False)
    record = json.loads(ran.stdout)
    assert {"spin_us_p50", "spin_us_p99", "parked_us_p50", "floor_spin_us", "floor_parked_us"} <= record.keys()
    assert ran.returncode == int(record["falls_short"]) == int(not all(v["met"] for v in record["verdicts"]))
    assert record["spin_ratio"] > 0 and record["parked_ratio"] > 0 and len(record["verdicts"]) == 2
    ran = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert "floor_parked_us" in ran.stdout and ran.stdout.splitlines()[-1].startswith("bench ring: ")


def test_ratios_are_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round in which the host did something else changes no median, and a ratio is of figures of one moment."""
    rounds = [dict.fromkeys(ring.MEANINGS, 1.0) | {"spin_us_p50": 2.0, "parked_us_p50": 3.0}] * 6
    rounds.append(dict.fromkeys(ring.MEANINGS, 100.0) | {"spin_us_p50": 9000.0})
    left = iter(rounds)
    monkeypatch.setattr(ring, "run", lambda *_: next(left))
    figures = ring.round_trips(1.0, 4096, 0, 0)
    assert (figures["spin_ratio"], figures["parked_ratio"], figures["floor_spin_us"]) == (2.0, 3.0, 1.0)


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [(["--client-cpu", "4095"], "CPU 4095", "allowed are"), (["--parts", "latency,sleep"], '"sleep"', "")],
)
def test_what_cannot_be_measured_is_refused(words: list[str], message: str, hint: str) -> None:
    refused = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and message in refused.stderr and hint in refused.stderr


def test_idle_costs_next_to_nothing() -> None:
    """A daemon and an attached client, as a user starts them."""
    figures = idling.measure(2.0)
    assert 0 <= figures["idle_client"] < 0.01 and 0 <= figures["idle_daemon"] < 0.01


@pytest.mark.parametrize("name", ["daemon and client on one CPU", "half of the CPUs' time as quota"])
def test_spinning_is_held_against_fixed_settings(name: str) -> None:
    record = spinning.measure(name, 0.02, 1)
    assert record["fixed_us"].keys() == {str(us) for us in spinning.FIXED_SETTINGS}
    assert record["ratio"] == round(min(record["fixed_us"].values()) / record["ours_us"], 3) > 0


def test_the_verdict() -> None:
    """Every target's figure is known; at its bound it is met, above it is not."""
    targets = ring.read_targets()
    assert all(verdict["met"] for verdict in ring.judge(targets, {row["figure"]: row["at_most"] for row in targets}))
    for row in targets:
        (verdict,) = ring.judge(targets, {row["figure"]: row["at_most"] * 1.001})
        assert verdict["target"] == row["name"] and not verdict["met"]
    known = {"spin_ratio", "parked_ratio", "idle_daemon", "idle_client", "spinning_slowdown"}
    assert {row["figure"] for row in targets} == known
