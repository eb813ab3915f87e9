"""Whether spinning gives way by itself: a small layer over the ring, with the rule of csrc/base/spin.h and with fixed
settings, where threads have their CPUs to themselves and where they do not.

A scenario is measured in a process of its own (this module as a program), which is the daemon's side, so that it can be
stopped and let go on as a quota does. Its client is one more process, which is handed session after session.
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
FIXED_SETTINGS = (0, 50, DEFAULT_US)
GEOMETRY: GeometryDict = {"num_layers": 1, "num_experts": 8, "hidden_size": 576, "intermediate_size": 512, "top_k": 2}
"""A layer so small that waiting weighs as much as computing."""
BFLOAT16 = 2
WARM_UP_SECONDS = 0.1
THINK_SECONDS = 50e-6
"""What the client computes between two layers."""
MOST_CPUS = 8
QUOTA_PERIOD_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


class Setting(TypedDict):
    """Of the data plane and of the client."""

    daemon: int
    client: int


@dataclass(frozen=True)
class Scenario:
    """`threads`: for each CPU. `quota`: part of the CPUs' time for the daemon's side. `one_cpu`: all on one.
    `apart`: daemon and client on CPUs of their own, where there are two."""

    threads: int = 1
    busy: bool = False
    quota: float = 0.0
    one_cpu: bool = False
    apart: bool = False

    def cpus(self) -> tuple[list[int], list[int]]:
        """The daemon's and the client's."""
        allowed = sorted(os.sched_getaffinity(0))[:MOST_CPUS]
        if self.apart and len(allowed) > 1:
            return allowed[: len(allowed) // 2], allowed[len(allowed) // 2 :]
        return (allowed[:1], allowed[:1]) if self.one_cpu else (allowed, allowed)

    def settings(self) -> dict[str, Setting]:
        """Ours is what a daemon of these CPUs has and gives a client of these CPUs."""
        daemon_cpus, client_cpus = self.cpus()
        shared = set(daemon_cpus) & set(client_cpus)
        fixed = {str(us): Setting(daemon=us | FIXED, client=us | FIXED) for us in FIXED_SETTINGS}
        return {"ours": Setting(daemon=DEFAULT_US, client=0 if shared else DEFAULT_US), **fixed}


SCENARIOS: Mapping[str, Scenario] = {
    "as many threads as CPUs": Scenario(),
    "twice as many threads as CPUs": Scenario(threads=2),
    "other busy processes on the CPUs": Scenario(busy=True),
    "half of the CPUs' time as quota": Scenario(quota=0.5),
    "daemon and client on one CPU": Scenario(one_cpu=True),
    "daemon and client on CPUs of their own": Scenario(apart=True),
}


class SpinRecord(TypedDict):
    """Medians in microseconds for a layer and what the client does besides; `ratio`: the best fixed time over ours."""

    scenario: str
    ours_us: float
    fixed_us: dict[str, float]
    ratio: float


def measure(name: str, seconds: float, rounds: int) -> SpinRecord:
    """One scenario. Raises SyshaxError."""
    scenario = SCENARIOS[name]
    cpus, _ = scenario.cpus()
    command = [sys.executable, "-m", "syshaxd.bench.spinning", "daemon", name, str(seconds), str(rounds)]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
        for cpu in cpus if scenario.busy else ():
            stack.enter_context(busy_process(cpu))
        if scenario.quota:
            stack.enter_context(quota(process.pid, scenario.quota * len(cpus)))
        out, err = process.communicate("go\n")
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
    cpus, client_cpus = scenario.cpus()
    planes = {key: DataPlane(core, cpus * scenario.threads, setting) for key, setting in scenario.settings().items()}
    times: dict[str, list[float]] = {key: [] for key in planes}
    ours, theirs = socket.socketpair()
    words = ["client", str(theirs.fileno()), str(seconds), ",".join(map(str, client_cpus))]
    with ours, subprocess.Popen([sys.executable, "-m", "syshaxd.bench.spinning", *words], pass_fds=[theirs.fileno()]):
        theirs.close()
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(rounds):
            for key, plane in list(planes.items())[:: 1 if number % 2 else -1]:
                times[key].append(plane.serve(ours))
        ours.shutdown(socket.SHUT_RDWR)
    return times


class DataPlane:
    """The daemon's side with one setting; loaded beforehand, because loading gives way to whoever is busy."""

    def __init__(self, core: Core, cpus: Sequence[int], setting: Setting) -> None:
        nodes = [{"node": -1, "cpus": list(cpus), "threads": len(cpus), "share": 1.0}]
        self._runtime, self._client_spin_us = core.Runtime(nodes, "", setting["daemon"], "off", 16), setting["client"]
        self._model = cast(Any, self._runtime.create_model("spin", GEOMETRY, "q8_0"))
        self._model.fill_random(0)
        self._model.seal()

    def serve(self, client: socket.socket) -> float:
        """A new session; microseconds for a layer, as the client says."""
        top_k = GEOMETRY["top_k"]
        layout = self._runtime.session_layout(self._model, 1, top_k, 2, 2)
        memory = os.memfd_create("syshax-bench-spin", os.MFD_CLOEXEC)
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ours, theirs = socket.socketpair()
        self._runtime.start()
        try:
            os.posix_fallocate(memory, 0, layout["total_bytes"])
            self._runtime.add_session(1, self._model, memory, doorbell, bytes(16), 1, top_k, 2, 2, self._client_spin_us)
            socket.send_fds(client, [b"session"], [memory, doorbell, theirs.fileno()])
            if not (answer := client.recv(64)):
                raise InternalError("the client of the spinning benchmark ended")
            return float(answer)
        finally:
            self._runtime.stop()
            os.close(memory)
            os.close(doorbell)
            ours.close()
            theirs.close()


def be_client(sessions: socket.socket, seconds: float, cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)
    while True:
        _, descriptors, _, _ = socket.recv_fds(sessions, 64, 3)
        if not descriptors:
            return
        memory, doorbell, connection = descriptors
        ring = Ring(memory, doorbell, socket.socket(fileno=connection))
        sessions.send(str(time_layers(ring, seconds)).encode())
        ring.close()


def time_layers(ring: Ring, seconds: float) -> float:
    """Microseconds for a layer."""
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
    return (now - begin) / calls * 1e6


def main(words: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would outlive a killed benchmark
    if words[0] == "busy":
        be_busy(int(words[1]))
    elif words[0] == "client":
        cpus = {int(cpu) for cpu in words[3].split(",")}
        be_client(socket.socket(fileno=int(words[1])), float(words[2]), cpus)
    else:
        core = compiled_core()
        with core_errors(core):
            print(json.dumps(be_daemon(core, words[1], float(words[2]), int(words[3]))))


if __name__ == "__main__":
    main(sys.argv[1:])
