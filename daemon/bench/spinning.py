"""Whether spinning gives way by itself: a small layer over the ring, with the rule of csrc/base/spin.h and with fixed
settings, where threads have their CPUs to themselves and where they do not.

A scenario is measured in a process of its own (this module as a program), which is the daemon's side; its client is
one more process. So a scenario may stop it and let it go on, as a quota does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from syshax.errors import InternalError
from syshax.ring import Ring
from syshaxd.config import ComputeConfig
from syshaxd.core import Core, GeometryDict, compiled_core, core_errors

FIXED = 1 << 31
"""Or-ed to a spin_us: spin so long, whatever happens (SYSHAX_SPIN_FIXED)."""
DEFAULT_US = ComputeConfig().spin_us
LARGE_US = 2000
FIXED_SETTINGS = (0, DEFAULT_US, LARGE_US)
GEOMETRY: GeometryDict = {"num_layers": 1, "num_experts": 8, "hidden_size": 576, "intermediate_size": 512, "top_k": 2}
"""A layer so small that waiting weighs as much as computing."""
BFLOAT16 = 2
WARM_UP_SECONDS = 0.1
THINK_SECONDS = 50e-6
"""What the client computes between two layers."""
MOST_CPUS = 8
QUOTA_PERIOD_SECONDS = 0.1


@dataclass(frozen=True)
class Scenario:
    """`threads`: for each CPU. `quota`: part of the CPUs' time for the daemon's side. `one_cpu`: all on one."""

    threads: int = 1
    busy: bool = False
    quota: float = 0.0
    one_cpu: bool = False


SCENARIOS: Mapping[str, Scenario] = {
    "as many threads as CPUs": Scenario(),
    "twice as many threads as CPUs": Scenario(threads=2),
    "other busy processes on the CPUs": Scenario(busy=True),
    "half of the CPUs' time as quota": Scenario(quota=0.5),
    "daemon and client on one CPU": Scenario(one_cpu=True),
}


class SpinRecord(TypedDict):
    """Medians in microseconds for a layer and what the client does besides; `ratio`: the best fixed time over ours."""

    scenario: str
    ours_us: float
    fixed_us: dict[str, float]
    ratio: float


class Setting(TypedDict):
    """Of the data plane and of the client."""

    daemon: int
    client: int


def settings() -> dict[str, Setting]:
    """Ours is what a daemon whose CPUs are shared with the client has."""
    fixed = {str(us): Setting(daemon=us | FIXED, client=us | FIXED) for us in FIXED_SETTINGS}
    return {"ours": Setting(daemon=DEFAULT_US, client=0), **fixed}


def measure(name: str, seconds: float, rounds: int) -> SpinRecord:
    """One scenario. Raises SyshaxError."""
    scenario = SCENARIOS[name]
    cpus = sorted(os.sched_getaffinity(0))[: 1 if scenario.one_cpu else MOST_CPUS]
    command = [sys.executable, "-m", "syshaxd.bench.spinning", "daemon", name, str(seconds), str(rounds)]
    with ExitStack() as stack:
        for cpu in cpus if scenario.busy else ():
            stack.enter_context(busy_process(cpu))
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        if scenario.quota:
            stack.enter_context(quota(process.pid, scenario.quota * len(cpus)))
        out, err = process.communicate()
    if process.returncode != 0:
        raise InternalError(f"the spinning benchmark failed: {(err.strip().splitlines() or ['no message'])[-1]}")
    times = cast(dict[str, list[float]], json.loads(out))
    medians = {key: round(statistics.median(values), 1) for key, values in times.items()}
    ours = medians.pop("ours")
    return {"scenario": name, "ours_us": ours, "fixed_us": medians, "ratio": round(min(medians.values()) / ours, 3)}


@contextmanager
def busy_process(cpu: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "syshaxd.bench.spinning", "busy", str(cpu)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def be_busy(cpu: int) -> None:
    """Until this process is killed or orphaned."""
    os.sched_setaffinity(0, {cpu})
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(10000):
            pass


@contextmanager
def quota(pid: int, cpus: float) -> Iterator[None]:
    """Stops the process, as the kernel's bandwidth control would, when it used its part of a period."""
    over = threading.Event()

    def control() -> None:
        while not over.is_set():
            end, limit = time.monotonic() + QUOTA_PERIOD_SECONDS, used_seconds(pid) + cpus * QUOTA_PERIOD_SECONDS
            while time.monotonic() < end and not over.is_set() and used_seconds(pid) < limit:
                time.sleep(0.0005)
            if time.monotonic() < end and not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(max(0.0, end - time.monotonic()))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=control)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def used_seconds(pid: int) -> float:
    """CPU time of a process's threads, from the scheduler's own count."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(task.read_text(encoding="ascii").split()[0])
        except (OSError, IndexError):
            continue  # it ended meanwhile
    return total / 1e9


def be_daemon(core: Core, name: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Times by setting, each setting once in every round, so that what changes on the machine meets all of them."""
    scenario = SCENARIOS[name]
    cpus = sorted(os.sched_getaffinity(0))[: 1 if scenario.one_cpu else MOST_CPUS]
    times: dict[str, list[float]] = {key: [] for key in settings()}
    for _ in range(rounds):
        for key, setting in settings().items():
            times[key].append(one_run(core, cpus * scenario.threads, setting, set(cpus), seconds))
    return times


def one_run(core: Core, cpus: Sequence[int], setting: Setting, client_cpus: set[int], seconds: float) -> float:
    nodes = [{"node": -1, "cpus": list(cpus), "threads": len(cpus), "share": 1.0}]
    runtime = core.Runtime(nodes, "", setting["daemon"], "off", 16)
    model = cast(Any, runtime.create_model("spin", GEOMETRY, "q8_0"))
    model.fill_random(0)
    model.seal()
    runtime.start()
    top_k = GEOMETRY["top_k"]
    layout = runtime.session_layout(model, 1, top_k, 2, 2)
    memory = os.memfd_create("syshax-bench-spin", os.MFD_CLOEXEC)
    doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    ours, theirs = socket.socketpair()
    try:
        os.posix_fallocate(memory, 0, layout["total_bytes"])
        runtime.add_session(1, model, memory, doorbell, bytes(16), 1, top_k, 2, 2, setting["client"])
        descriptors = (memory, doorbell, theirs.fileno())
        words = ["client", *map(str, descriptors), str(seconds), ",".join(map(str, client_cpus))]
        command = [sys.executable, "-m", "syshaxd.bench.spinning", *words]
        return float(subprocess.run(command, pass_fds=descriptors, stdout=subprocess.PIPE, check=True).stdout)
    finally:
        runtime.stop()
        os.close(memory)
        os.close(doorbell)
        ours.close()
        theirs.close()


def be_client(memory: int, doorbell: int, connection: int, seconds: float, cpus: set[int]) -> float:
    """Microseconds for a layer."""
    os.sched_setaffinity(0, cpus)
    ring = Ring(memory, doorbell, socket.socket(fileno=connection))
    hidden, top_k, experts = GEOMETRY["hidden_size"], GEOMETRY["top_k"], GEOMETRY["num_experts"]
    states = (ctypes.c_uint16 * hidden)(*([0x3F80] * hidden))
    output = (ctypes.c_uint16 * hidden)()
    weights = (ctypes.c_float * top_k)(*([1 / top_k] * top_k))
    ids = [(ctypes.c_int32 * top_k)(*((first + i) % experts for i in range(top_k))) for first in range(experts)]
    buffers = [ctypes.addressof(x) for x in (states, weights, output)]
    begin, calls = time.perf_counter(), 0
    warm = False
    while True:
        chosen = ctypes.addressof(ids[calls % experts])
        result = ring.moe(0, 1, top_k, BFLOAT16, buffers[0], chosen, buffers[1], buffers[2], 60.0)
        if result.status != 0:
            raise InternalError(f"a request ended with status {result.status}")
        calls += 1
        now = time.perf_counter()
        if not warm and now - begin > WARM_UP_SECONDS:
            warm, begin, calls = True, now, 0
        elif now - begin > seconds and calls:
            break
        while time.perf_counter() - now < THINK_SECONDS:
            pass
    ring.close()
    return (now - begin) / calls * 1e6


def main(words: Sequence[str]) -> None:
    if words[0] == "busy":
        be_busy(int(words[1]))
    elif words[0] == "client":
        memory, doorbell, connection = map(int, words[1:4])
        print(be_client(memory, doorbell, connection, float(words[4]), {int(cpu) for cpu in words[5].split(",")}))
    else:
        core = compiled_core()
        with core_errors(core):
            print(json.dumps(be_daemon(core, words[1], float(words[2]), int(words[3]))))


if __name__ == "__main__":
    main(sys.argv[1:])
