"""The client processes of the chaos run: bystanders that send without pause, and victims that are brought into a state.

All are forked from one process that has everything imported (multiprocessing's forkserver, which preloads this module),
so that one costs milliseconds. They take orders and give reports over a pipe; a pipe that ends, ends them. Every answer
is compared with the reference, every call ends in a right answer, an error with a code, or a line in `faults`.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import answers
import numpy as np

from syshax import Client, Model
from syshax.errors import InternalError, ModelNotReadyError, ShuttingDownError, SyshaxError
from syshax.protocol import Dtype
from syshax.ring import Status

if answers.TABLES_VARIABLE in os.environ:  # in the process that clients are forked from: read once for all
    answers.of_environment()
GRACE_SECONDS = 1.0
"""How much later than its timeout a call may end where CPUs are few and taken."""
_STATUS_ERRORS = {Status.MODEL_GONE: ModelNotReadyError, Status.SHUTTING_DOWN: ShuttingDownError}
_SPIN_US_OFFSET = 272  # of the ring's header; a client may write there, for itself


def unmoved() -> float:
    """Seconds of a clock that the shim does not move: a call is not as long as its client's clock jumped."""
    return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


@dataclass
class Report:
    """What a process's requests came to since it began."""

    right: int = 0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of the right ones since the last report, at most 1000."""
    oldest: float = 0.0
    """Seconds that the oldest call under way has been out."""
    mappings: int = 0
    """Of sessions' memory in this process."""
    boot_id: str = ""


@dataclass(frozen=True)
class Kind:
    """What a client's requests look like."""

    format: str
    tokens: tuple[int, int]
    """Least and most of one request."""
    dtypes: tuple[str, ...] = ("float32",)
    layers: tuple[int, ...] = tuple(range(answers.LAYERS))
    top_ks: tuple[int, ...] = answers.TOP_KS
    priority: str = "normal"
    pause: float = 0.002
    timeout: float = 30.0
    reconnect: float = 20.0
    threads: int = 1
    num_slots: int = 2
    model: str = ""
    """Its name in the daemon; empty: the format's."""
    count: int = 0
    """Requests to send; 0: until told to stop."""
    seed: int = 0

    def open(self, runtime_dir: str, **more: Any) -> Model:
        return Client(runtime_dir).open(
            self.model or self.format, max_tokens=self.tokens[1], num_slots=self.num_slots, top_k=answers.TOP_K,
            priority=self.priority, dtype="float32" if "float32" in self.dtypes else self.dtypes[0], wait=20.0, **more,
        )  # fmt: skip


class Sender:
    """Sends requests of one kind with one model and counts what becomes of them. Thread-safe."""

    def __init__(self, kind: Kind, model: Model) -> None:
        self.kind, self.model, self.report = kind, model, Report()
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        self._random = np.random.default_rng([kind.seed, 17])
        self._last = "right"

    def choose(self) -> tuple[np.ndarray, int, int, str]:
        kind = self.kind
        with self._lock:
            random = self._random
            # mostly small ones: sizes are spread over their logarithm
            low, high = (np.log(size) for size in kind.tokens)
            tokens = int(np.exp(random.uniform(low, high)) + 0.5)
            rows = random.integers(0, answers.ROWS, tokens)
            layer, top_k = int(random.choice(kind.layers)), int(random.choice(kind.top_ks))
            return rows, layer, top_k, str(random.choice(kind.dtypes))

    def once(self) -> str:
        """Sends one; gives "right", "wrong" or the error's code."""
        rows, layer, top_k, dtype = self.choose()
        if dtype == "bfloat16" and self._last != "right":
            dtype = "float32"  # only moe() attaches again
        arrays = answers.of_environment().input(rows, top_k, dtype)
        if dtype == "bfloat16":
            return self.judge(lambda: self._through_slot(layer, arrays, dtype), rows, layer, top_k, dtype)
        kind = self.kind
        return self.judge(
            lambda: self.model.moe(layer, *arrays, timeout=kind.timeout, reconnect_s=kind.reconnect),
            rows, layer, top_k, dtype,
        )  # fmt: skip

    def judge(self, call: Callable[[], Any], rows: np.ndarray, layer: int, top_k: int, dtype: str) -> str:
        kind, begun, me = self.kind, unmoved(), threading.get_ident()
        with self._lock:
            self._begun[me] = begun
        outcome, fault = "right", ""
        try:
            got = call()
            if not answers.of_environment().right(got, rows, kind.format, layer, top_k, dtype):
                outcome, fault = "wrong", f"a wrong answer: {len(rows)} tokens, layer {layer}, top_k {top_k}, {dtype}"
        except SyshaxError as error:
            outcome = error.code
            if error.code == "internal":
                fault = f"an error without a name of its own: {error}"
        except Exception as error:  # noqa: BLE001  (whatever it is, the run fails with it)
            outcome = type(error).__name__
            fault = f"an error that is none of ours: {error!r}"
        self._last = outcome
        seconds = unmoved() - begun
        if seconds > kind.timeout + GRACE_SECONDS:
            fault = fault or f"a call ended after {seconds:.1f} s, its timeout was {kind.timeout:g} s"
        with self._lock:
            self._begun.pop(me, None)
            if fault:
                self.report.faults.append(f"{kind.model or kind.format} ({kind.priority}): {fault}")
            elif outcome == "right":
                self.report.right += 1
                self.report.latencies.append(seconds)
                del self.report.latencies[:-1000]
            else:
                self.report.errors[outcome] += 1
        return outcome

    def _through_slot(self, layer: int, arrays: answers.Input, dtype: str) -> np.ndarray:
        """numpy has no bfloat16: such a request goes by the slot's addresses, as an accelerator's does."""
        slot = self.model.acquire(self.kind.timeout)
        try:
            tokens, top_k = arrays.topk_ids.shape
            places = (slot.hidden_states, slot.topk_ids, slot.topk_weights)
            for place, array in zip(places, arrays, strict=True):
                ctypes.memmove(place, array.ctypes.data, array.nbytes)
            slot.submit(layer, tokens, top_k, Dtype(dtype).ring_code)
            result = slot.wait(self.kind.timeout)
            if result.status != Status.OK:
                raise _STATUS_ERRORS.get(result.status, InternalError)(f"status {result.status}")
            got = np.empty_like(arrays.hidden_states)
            ctypes.memmove(got.ctypes.data, slot.output, got.nbytes)
            return got
        finally:
            slot.release()

    def snapshot(self) -> Report:
        with self._lock:
            report = Report(**vars(self.report))
            self.report.latencies, self.report.faults = [], []
            now = unmoved()
            report.oldest = max((now - begun for begun in self._begun.values()), default=0.0)
        report.mappings = session_mappings(os.getpid())
        report.boot_id = self.model.boot_id
        return report


def session_mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/syshax-")


def bystander(pipe: Connection, runtime_dir: str, kind: Kind) -> None:
    """Sends until "stop" comes; answers every other word with a Report. The last report comes by itself."""
    gc.disable()  # a session's memory goes with the last call that uses it, whenever cycles are looked for
    sender = Sender(kind, kind.open(runtime_dir))
    stopped = threading.Event()

    def send() -> None:
        left = kind.count // kind.threads
        while not stopped.is_set() and (left or not kind.count):
            left -= 1
            if sender.once() != "right":
                time.sleep(0.05)
            if kind.pause:
                time.sleep(kind.pause)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(kind.threads)]
    pipe.send("ready")
    pipe.recv()  # all begin together
    for thread in threads:
        thread.start()
    with suppress(EOFError, OSError):
        while not kind.count and pipe.recv() != "stop":
            pipe.send(sender.snapshot())
        if not kind.count:
            stopped.set()
        for thread in threads:
            thread.join(None if kind.count else kind.timeout + 5)
        sender.model.close()
        pipe.send(sender.snapshot())
    os._exit(0)


# ------------------------------------------------------------------------------------ victims


def _attached(victim: Victim) -> None:
    victim.sender.once()


def _filling(victim: Victim) -> None:
    slot = victim.sender.model.acquire(5)
    ctypes.memset(slot.hidden_states, 0x55, 4096)
    victim.kept.append(slot)


def _submitted(victim: Victim) -> None:
    victim.submit(1)


def _many(victim: Victim) -> None:
    victim.submit(victim.kind.num_slots)


def _parked(victim: Victim) -> None:
    victim.set_spinning(0)
    victim.wait_in_threads(1)


def _spinning(victim: Victim) -> None:
    victim.set_spinning(1_000_000)
    victim.wait_in_threads(1)


def _for_a_slot(victim: Victim) -> None:
    victim.submit(victim.kind.num_slots)
    victim.wait_in_threads(2)


def _lockstep(victim: Victim) -> None:
    """Decodes on and on, beside others that decode the same layer."""
    victim.wait_in_threads(1, again=True)


STATES: dict[str, Callable[[Victim], None]] = {
    "just attached": _attached,
    "writing a request": _filling,
    "between submit and completion": _submitted,
    "many slots in flight": _many,
    "waiting parked": _parked,
    "waiting spinning": _spinning,
    "waiting for a slot": _for_a_slot,
    "decoding in step": _lockstep,
}


class Victim:
    """One client process in one state; what is outstanding is judged when `finish` is called."""

    def __init__(self, kind: Kind, model: Model) -> None:
        self.kind, self.sender = kind, Sender(kind, model)
        self.kept: list[Any] = []
        self._pending: list[tuple[Any, ...]] = []
        self._threads: list[threading.Thread] = []
        self._enough = threading.Event()

    def submit(self, count: int) -> None:
        for _ in range(count):
            rows, layer, top_k, dtype = self.sender.choose()
            pending = self.sender.model.submit(
                layer, *answers.of_environment().input(rows, top_k, dtype), timeout=self.kind.timeout
            )
            self._pending.append((pending, rows, layer, top_k, dtype))

    def wait_in_threads(self, count: int, again: bool = False) -> None:
        def run() -> None:
            self.sender.once()
            while again and not self._enough.is_set():
                self.sender.once()

        self._threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def set_spinning(self, microseconds: int) -> None:
        address, _ = self.sender.model.memory()
        ctypes.c_uint32.from_address(address + _SPIN_US_OFFSET).value = microseconds

    def shut_down(self, how: str) -> None:
        """Ends the session from this side while requests are out."""
        if how == "close":
            self.sender.model.close()
        else:
            session = self.sender.model._session
            if session is not None:
                session.ring._connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> Report:
        self._enough.set()
        for pending, *what in self._pending:
            self.sender.judge(lambda pending=pending: pending.result(self.kind.timeout), *what)  # type: ignore[misc]
        for thread in self._threads:
            thread.join(self.kind.timeout + 2 * GRACE_SECONDS)
            if thread.is_alive():
                self.sender.report.faults.append(f"a call still waits after its timeout of {self.kind.timeout:g} s")
        self.sender.model.close()
        return self.sender.snapshot()


def victim(pipe: Connection, runtime_dir: str, kind: Kind, state: str) -> None:
    """Attaches and goes into the state; "finish" gives the Report and ends, other words end its session."""
    made = Victim(kind, kind.open(runtime_dir))
    STATES[state](made)
    pipe.send("ready")
    with suppress(EOFError, OSError):
        while (word := pipe.recv()) != "finish":
            made.shut_down(word)
        pipe.send(made.finish())
    os._exit(0)
