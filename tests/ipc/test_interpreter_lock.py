"""The data plane needs no Python: while the daemon's process holds its interpreter's lock, answers come as always."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ring_harness import FakeDaemon

BLOCKED_S = 2.0
CLIENT = """
import json, sys, time
import numpy as np
from ring_harness import batch, reference
from syshax import Client
model = Client(sys.argv[1]).open("tiny")
x, ids, weights = batch(3)
expected = reference(1, x, ids, weights).view(np.uint32)
model.moe(1, x, ids, weights)
print("ready", flush=True)
calls, end = [], time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    begin = time.monotonic()
    right = np.array_equal(model.moe(1, x, ids, weights).view(np.uint32), expected)
    calls.append((begin, time.monotonic() - begin, right))
    time.sleep(0.001)
print(json.dumps(calls))
"""


def test_a_blocked_interpreter_delays_nothing(tmp_path: Path) -> None:
    hold_lock = ctypes.PyDLL(None).usleep  # PyDLL, unlike CDLL, keeps the lock during the call
    with FakeDaemon(tmp_path) as daemon:
        command = [sys.executable, "-c", CLIENT, str(daemon.runtime_dir), str(BLOCKED_S + 2)]
        path = str(Path(__file__).parent.parent)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(path)) as client:
            assert client.stdout is not None and client.stdout.readline() == "ready\n"
            time.sleep(0.5)
            begin = time.monotonic()
            hold_lock(int(BLOCKED_S * 1e6))
            end = time.monotonic()
            calls = json.loads(client.stdout.readline())
    assert end - begin >= BLOCKED_S
    assert all(right for _, _, right in calls)
    during = [took for at, took, _ in calls if begin <= at < end]
    outside = [took for at, took, _ in calls if not begin <= at < end]
    assert len(during) > 100 and len(outside) > 50
    assert max(during) < BLOCKED_S / 4, "no call waited for the interpreter"
    assert statistics.median(during) < 2 * statistics.median(outside)


def _environment(path: str) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{path}:{before}" if before else path}
