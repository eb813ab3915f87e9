"""The table of faults: what may happen to clients, to the daemon and to the machine under them.

A fault is a function that does its harm to a Stand, undoes it, and returns; what must hold afterwards is the stand's
settle(). Codes named at finish() and in `allowed` are the errors that a request may end in instead of an answer.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from clients import STATES, Kind
from stand import Process, Stand

from syshax import Client
from syshax.errors import SyshaxError
from syshax.protocol import (
    ConfigChangeAnswer,
    ConfigSetRequest,
    ModelInfo,
    Priority,
    SessionChange,
    SessionInfo,
    UnloadAnswer,
)

LONG = Kind("bf16", (1024, 4096), top_ks=(4,), priority="batch", timeout=20.0, reconnect=15.0)
MANY = Kind("bf16", (1, 400), num_slots=16, timeout=20.0, reconnect=15.0)
SMALL = Kind("q8_0", (1, 32), timeout=20.0, reconnect=15.0)
STEP = Kind("bf16", (1, 4), layers=(0,), priority="interactive", timeout=20.0, reconnect=15.0, pause=0.0)
KIND_OF = {
    "just attached": SMALL,
    "writing a request": SMALL,
    "between submit and completion": LONG,
    "many slots in flight": MANY,
    "waiting parked": LONG,
    "waiting spinning": LONG,
    "waiting for a slot": LONG,
    "decoding in step": STEP,
}
BUSY = [state for state in STATES if state not in ("just attached", "writing a request")]
GONE = ("daemon_lost", "shutting_down")
"""How a request may end whose session ends under it and that may not be sent again."""
UNLOADED = ("model_not_ready", "unknown_model", *GONE)


@dataclass(frozen=True)
class Fault:
    """`group` is the row of the table of results."""

    group: str
    name: str
    do: Callable[[Stand], None]


FAULTS: list[Fault] = []


def fault(group: str, name: str) -> Callable[[Callable[[Stand], None]], Callable[[Stand], None]]:
    def enter(do: Callable[[Stand], None]) -> Callable[[Stand], None]:
        FAULTS.append(Fault(group, name, do))
        return do

    return enter


def prioritised(stand: Stand, kind: Kind) -> Kind:
    return replace(
        kind, priority=stand.dice.choice(["interactive", "normal", "batch"]), seed=stand.dice.randrange(1 << 30)
    )


def in_state(stand: Stand, state: str) -> Process:
    return stand.attach(prioritised(stand, KIND_OF[state]), state)


# ------------------------------------------------------------------------------------ clients


def _kill_in(state: str) -> None:
    @fault("client killed (kill -9)", state)
    def do(stand: Stand) -> None:
        process = in_state(stand, state)
        stand.pause(0, 0.05)
        process.kill()


def _stop_in(state: str) -> None:
    @fault("client stopped (SIGSTOP, SIGCONT)", state)
    def do(stand: Stand) -> None:
        process = in_state(stand, state)
        stand.pause(0, 0.02)
        process.signal(signal.SIGSTOP)
        stand.progress()
        stand.pause(0.05, 0.3)
        process.signal(signal.SIGCONT)
        stand.finish(process)


for _state in STATES:
    _kill_in(_state)
for _state in BUSY:
    _stop_in(_state)


@fault("client killed (kill -9)", "while stopped")
def _kill_stopped(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    process.signal(signal.SIGSTOP)
    stand.pause(0.05, 0.3)
    process.kill()


@fault("client killed (kill -9)", "while it attaches")
def _kill_attaching(stand: Stand) -> None:
    for process in [stand.attach_begin(prioritised(stand, MANY)) for _ in range(3)]:
        stand.pause(0, 0.03)
        process.kill()


@fault("client stopped (SIGSTOP, SIGCONT)", "for longer than limits.stopped_seconds")
def _stop_long(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(["waiting parked", "decoding in step"]))
    (session,) = [info for info in stand.sessions() if info.pid == process.pid]
    process.signal(signal.SIGSTOP)
    deadline = time.monotonic() + 8
    while any(info.session_id == session.session_id for info in stand.sessions()):
        if time.monotonic() > deadline:
            stand.shortfalls.append("a stopped client's session did not end")
            break
        time.sleep(0.05)
    stand.progress()
    process.signal(signal.SIGCONT)
    stand.finish(process, *GONE)  # its calls attach again by themselves


@fault("connection closed with requests in flight", "detach")
def _detach(stand: Stand) -> None:
    _end_from_within(stand, "close")


@fault("connection closed with requests in flight", "socket shut down")
def _shut_down(stand: Stand) -> None:
    _end_from_within(stand, "shutdown")


def _end_from_within(stand: Stand, how: str) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    stand.pause(0, 0.05)
    process.pipe.send(how)
    stand.finish(process, *GONE, "invalid_argument")  # closed by its own side: "model ... is closed"


@fault("connection closed with requests in flight", "ended by an administrator")
def _kick(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    (session,) = [info for info in stand.sessions() if info.pid == process.pid]
    stand.control.delete(f"/v1/sessions/{session.session_id}")
    stand.finish(process, *GONE, "session_ended")


@fault("one of several that are computed together dies", "killed and stopped")
def _lockstep(stand: Stand) -> None:
    together = [stand.attach(replace(STEP, seed=number), "decoding in step") for number in range(4)]
    stand.pause(0.05, 0.15)
    together[0].signal(signal.SIGSTOP)
    together[1].kill()
    stand.progress()
    stand.together += sum(info.batched for info in stand.sessions())
    together[0].signal(signal.SIGCONT)
    for process in (together[0], *together[2:]):
        stand.finish(process)


@fault("class and share changed with requests in flight", "throttled, of the lowest class, then back")
def _change(stand: Stand) -> None:
    processes = _load_on(stand)
    numbers = [info.session_id for info in stand.sessions() if info.pid in [process.pid for process in processes]]
    for _ in range(5):
        for number in numbers:
            change = SessionChange(priority=stand.dice.choice(list(Priority)), share=stand.dice.choice([1, 10, 100]))
            stand.control.patch(f"/v1/sessions/{number}", change, SessionInfo)
        stand.pause(0.01, 0.05)
    stand.progress()
    for number in numbers:
        stand.control.patch(f"/v1/sessions/{number}", SessionChange(share=100), SessionInfo)
    _finish_all(stand, processes)


@fault("class and share changed with requests in flight", "killed while throttled")
def _kill_throttled(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(["waiting parked", "waiting spinning", "many slots in flight"]))
    (number,) = [info.session_id for info in stand.sessions() if info.pid == process.pid]
    stand.control.patch(f"/v1/sessions/{number}", SessionChange(share=1), SessionInfo)
    stand.pause(0.02, 0.1)
    process.kill()


# -------------------------------------------------------------------------------- the daemon


def _load_on(stand: Stand) -> list[Process]:
    """Victims that have requests out, of every priority: a long one, many small ones, steady decoding."""
    return [
        stand.attach(replace(KIND_OF[state], priority=priority, seed=stand.dice.randrange(1 << 30)), state)
        for state, priority in (("waiting parked", "batch"), ("many slots in flight", "normal"),
                                ("decoding in step", "interactive"))
    ]  # fmt: skip


def _finish_all(stand: Stand, processes: list[Process], *allowed: str) -> None:
    for process in processes:
        stand.finish(process, *allowed)


@fault("daemon killed (kill -9)", "with requests out")
def _kill_daemon(stand: Stand) -> None:
    stand.allowed = set(GONE)  # what goes by slots or submit() is not sent again by itself
    processes = _load_on(stand)
    stand.pause(0, 0.05)
    stand.manager.restart(signal.SIGKILL)
    _finish_all(stand, processes, *GONE)


@fault("daemon killed (kill -9)", "twice, the second time while it starts")
def _kill_starting(stand: Stand) -> None:
    stand.allowed = set(GONE)  # what goes by slots or submit() is not sent again by itself
    stand.manager.restart(signal.SIGKILL, wait=False)
    stand.pause(0, 1.0)
    stand.manager.restart(signal.SIGKILL)


@fault("daemon restarted (drain)", "with requests out")
def _restart(stand: Stand) -> None:
    stand.allowed = set(GONE)  # what goes by slots or submit() is not sent again by itself
    processes = _load_on(stand)
    stand.pause(0, 0.05)
    code = stand.manager.restart(signal.SIGTERM)
    if code != 0:
        stand.shortfalls.append(f"the daemon ended with {code} after SIGTERM")
    _finish_all(stand, processes, *GONE)


@fault("daemon stopped (SIGSTOP, SIGCONT)", "with requests out")
def _stop_daemon(stand: Stand) -> None:
    impatient = stand.attach(replace(LONG, timeout=0.2, reconnect=0.0), "waiting parked")
    processes = _load_on(stand)
    os.kill(stand.pid, signal.SIGSTOP)
    stand.pause(0.3, 1.0)
    os.kill(stand.pid, signal.SIGCONT)
    stand.finish(impatient, "timeout")
    _finish_all(stand, processes)


# --------------------------------------------------------------------------------- models


@contextmanager
def _second_model(stand: Stand) -> Iterator[str]:
    name = f"u{stand.dice.randrange(1 << 30)}"
    stand.manager.load(name, stand.folder / "model", "bf16")
    yield name
    try:
        stand.control.delete(f"/v1/models/{name}?force=1", UnloadAnswer)
    except SyshaxError as error:
        if error.code != "unknown_model":
            raise
    deadline = time.monotonic() + 5
    while name in stand.manager.models():
        if time.monotonic() > deadline:
            stand.shortfalls.append(f"{name} is not unloaded 5 s after it was asked for")
            return
        time.sleep(0.01)


@fault("model unloaded while in use", "then loaded again")
def _unload(stand: Stand) -> None:
    with _second_model(stand) as name:
        processes = [
            stand.attach(replace(prioritised(stand, KIND_OF[state]), model=name, reconnect=0.0), state)
            for state in stand.dice.sample(BUSY, 3)
        ]
        stand.pause(0, 0.05)
        stand.refused(lambda: stand.control.delete(f"/v1/models/{name}", UnloadAnswer), "model_in_use")
        stand.control.delete(f"/v1/models/{name}?force=1", UnloadAnswer)
        _finish_all(stand, processes, *UNLOADED)
    with _second_model(stand) as name:
        stand.finish(stand.attach(replace(LONG, model=name), "waiting parked"))


@fault("model unloaded while in use", "while it is loaded")
def _cancel(stand: Stand) -> None:
    name = f"c{stand.dice.randrange(1 << 30)}"
    stand.manager.load_begin(name, stand.folder / "model", "q4_0")
    stand.pause(0, 0.1)
    stand.control.delete(f"/v1/models/{name}?force=1", UnloadAnswer)
    deadline = time.monotonic() + 5
    while name in stand.manager.models() and time.monotonic() < deadline:
        if stand.manager.models()[name].state == "failed":
            stand.control.delete(f"/v1/models/{name}?force=1", UnloadAnswer)
        time.sleep(0.02)


# ------------------------------------------------------------------------------- resources


@contextmanager
def _limited(stand: Stand, limit: int, value: int) -> Iterator[None]:
    """The running daemon's own limit, for a while."""
    pid = stand.pid
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, before)


def _open(stand: Stand, **more: int) -> Callable[[], object]:
    def attach() -> None:
        with Client(stand.manager.runtime_dir) as client:
            client.open("bf16", **({"max_tokens": 4096, "num_slots": 4} | more))  # type: ignore[arg-type]

    return attach


@fault("memory runs out", "limits.shared_memory_total")
def _shared_memory_limit(stand: Stand) -> None:
    held = sum(info.shm_bytes for info in stand.sessions())

    def limit(size: str) -> None:
        change = ConfigSetRequest(values={"limits.shared_memory_total": size})
        stand.control.patch("/v1/config", change, ConfigChangeAnswer)

    process = in_state(stand, stand.dice.choice(BUSY))
    limit(str(held + (1 << 20)))
    stand.refused(_open(stand), "limit")
    stand.finish(process)
    limit("160MiB")
    _open(stand, max_tokens=64)()


@fault("memory runs out", "address space (RLIMIT_AS)")
def _address_space(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    name = f"a{stand.dice.randrange(1 << 30)}"
    size = int(Path(f"/proc/{stand.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with _limited(stand, resource.RLIMIT_AS, size + stand.dice.choice([1, 4, 8]) * (1 << 20)):
        stand.refused(_open(stand), "no_memory", "limit")
        stand.manager.load_begin(name, stand.folder / "model", "bf16")
        info = stand.manager.model(name)
        while info.state == "loading":
            time.sleep(0.01)
            info = stand.manager.model(name)
        if info.state != "failed" or not info.reason:
            stand.shortfalls.append(f"a load without address space is {info.state}: {info.reason!r}")
    stand.control.delete(f"/v1/models/{name}?force=1", UnloadAnswer)
    stand.finish(process)
    _open(stand)()


@fault("descriptors run out", "RLIMIT_NOFILE")
def _descriptors(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    numbers = [int(name) for name in os.listdir(f"/proc/{stand.pid}/fd")]  # noqa: PTH208
    free = stand.dice.randrange(8)
    lowest = [number for number in range(max(numbers) + 10) if number not in numbers][free]
    with _limited(stand, resource.RLIMIT_NOFILE, lowest):
        for _ in range(2):
            try:
                attached = Client(stand.manager.runtime_dir).open("bf16", max_tokens=64, wait=0.3)
                attached.close()
                stand.outcomes["right"] += 1
            except SyshaxError as error:
                stand.outcomes[error.code] += 1
                if error.code not in ("limit", "timeout", "no_memory", "daemon_lost"):
                    stand.shortfalls.append(f"{error.code} without descriptors: {error}")
        stand.progress()
    stand.finish(process)
    _open(stand, max_tokens=64)()


@fault("/dev/shm is full", "all but some pages")
def _full_shm(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    root = Path(f"/proc/{stand.pid}/root/dev/shm")
    filler = root / "filler"
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - stand.dice.choice([0, 1, 4096]) * 4096)
    try:
        stand.refused(_open(stand), "no_memory")
        stand.progress()
        stand.finish(process)
    finally:
        filler.unlink()
    _open(stand)()


# ----------------------------------------------------------------------------- connections


def _dial(stand: Stand, name: str, kind: socket.SocketKind) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.settimeout(5)
    connection.connect(str(stand.manager.runtime_dir / name))
    return connection


@fault("control connection slow or half open", "a byte at a time, never the end")
def _slow_control(stand: Stand) -> None:
    request = b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
    with ExitStack() as stack:
        connections = [stack.enter_context(_dial(stand, "control.sock", socket.SOCK_STREAM)) for _ in range(5)]
        for place in range(stand.dice.randrange(len(request))):
            for connection in connections:
                connection.send(request[place : place + 1])
            time.sleep(0.002)
        stand.control.get("/v1/models/bf16", ModelInfo)
        stand.progress()


@fault("control connection slow or half open", "many, silent or closed one way")
def _half_open_control(stand: Stand) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(_dial(stand, "control.sock", socket.SOCK_STREAM)) for _ in range(40)]
        for number, connection in enumerate(connections):
            if number % 3 == 1:
                connection.send(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")  # and never reads the answer
            if number % 3 == 2:
                connection.shutdown(socket.SHUT_WR)
        stand.control.get("/v1/models/bf16", ModelInfo)
        stand.progress()


@fault("attach connection slow", "silent ones, then one that asks")
def _slow_attach(stand: Stand) -> None:
    with ExitStack() as stack:
        for _ in range(stand.dice.choice([1, 10, 40])):
            stack.enter_context(_dial(stand, "attach.sock", socket.SOCK_SEQPACKET))
        stand.finish(stand.attach(prioritised(stand, SMALL)))
        stand.progress()


@fault("attach connection slow", "never reads its answer")
def _unread_answer(stand: Stand) -> None:
    request = b'{"protocol": 1, "model": "bf16", "max_tokens": 512}'
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(_dial(stand, "attach.sock", socket.SOCK_SEQPACKET)).send(request)
        stand.finish(stand.attach(prioritised(stand, SMALL)))
        stand.progress()


# ---------------------------------------------------------------------------------- clocks


@fault("clock jumps", "the daemon's CLOCK_REALTIME, either way")
def _realtime(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    by = stand.dice.choice([-1, 1]) * 10 ** stand.dice.uniform(0, 7)
    stand.jump("daemon", realtime=by)
    stand.progress()
    stand.finish(process)
    stand.jump("daemon", realtime=-by)


@fault("clock jumps", "the daemon's CLOCK_MONOTONIC, forward")
def _monotonic(stand: Stand) -> None:
    """As after a virtual machine's pause; it never goes back. Whoever attaches just then may have to do so again."""
    process = in_state(stand, stand.dice.choice(BUSY))
    stand.jump("daemon", monotonic=10 ** stand.dice.uniform(-1, 4))
    stand.progress()
    stand.finish(process, *GONE)


@fault("clock jumps", "the clients' clocks")
def _clients_clocks(stand: Stand) -> None:
    process = in_state(stand, stand.dice.choice(BUSY))
    stand.allowed = {"timeout"}
    by = stand.dice.choice([-1, 1]) * 10 ** stand.dice.uniform(0, 7)
    stand.jump("clients", realtime=by, monotonic=10 ** stand.dice.uniform(-1, 2))
    stand.progress()
    stand.finish(process, "timeout", *GONE)
    stand.jump("clients", realtime=-by)
