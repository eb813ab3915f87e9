"""What the faults are done to: a daemon under a service manager, bystanders that send all the time, and the watching.

Owns every process of the run, the measuring of what the daemon holds (descriptors, threads, mappings, /dev/shm,
memory), and the one judgement after a round: settle(). The daemon runs in a mount namespace of its own, with a small
/dev/shm that can be filled without harm to anybody else, and with clocks that can be moved (clock_shim.c).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import answers
from clients import Kind, Report, bystander, session_mappings, victim
from service_manager import ServiceManager, private_shm

from syshax.errors import SyshaxError
from syshax.protocol import SessionsAnswer, StatusAnswer
from syshaxd.bench.timing import machine_seconds

HERE = Path(__file__).resolve().parent
RECOVERY_SECONDS = 5.0
"""Within which everything must be as before."""
NOISY_CPUS, NOISY_SECONDS = 0.5, 30.0
"""Where programs that are none of this run take so much, it may take so long, and the round counts as noisy."""
SHM_BYTES = 192 << 20
MEMORY_SLACK = 12 << 20
"""Bytes of its own that the daemon may hold more than at the start: its heap's fragments."""
CONTROL_THREADS = 1 + min(32, (os.cpu_count() or 1) + 4) + 2
"""The event loop's, asyncio's pool, and one each for loads and for the cache."""
BYSTANDERS = {
    "interactive": Kind("bf16", (1, 4), layers=(0,), priority="interactive", seed=1),
    "normal": Kind("bf16", (1, 4), layers=(0,), threads=2, seed=2),
    "batch": Kind("bf16", (1024, 4096), dtypes=("float16",), priority="batch", pause=0.2, seed=3),
    "mixed": Kind("q8_0", (1, 300), dtypes=("float32", "bfloat16", "float16"), pause=0.005, reconnect=20.0, seed=4),
}
CONFIG = """
[limits]
stopped_seconds = 1
shared_memory_total = "160MiB"
drain_seconds = 10
[cache]
enabled = false
"""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a daemon holds."""

    descriptors: int
    threads: int
    """Of the data plane, which has as many as its plan says."""
    more_threads: int
    """Of the control plane beyond those that its pools may grow to."""
    mappings: int
    """Of sessions' memory."""
    shm: int
    """Bytes of its /dev/shm in use."""
    memory: int
    """Bytes of its own (RssAnon)."""
    names: int
    """Left in /dev/shm."""

    @classmethod
    def of(cls, pid: int) -> Usage:
        root = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
        shm = os.statvfs(root / "root/dev/shm")
        names = [(task / "comm").read_text() for task in (root / "task").iterdir()]
        native = sum(name.startswith(("syshax-", "moe-")) for name in names)
        return cls(
            len(os.listdir(root / "fd")),  # noqa: PTH208
            native,
            max(0, len(names) - native - CONTROL_THREADS),
            session_mappings(pid),
            (shm.f_blocks - shm.f_bfree) * shm.f_frsize,
            int(status["RssAnon"].split()[0]) << 10,
            len(os.listdir(root / "root/dev/shm")),  # noqa: PTH208
        )

    def beyond(self, before: Usage) -> list[str]:
        """In words, what is more than before."""
        found = []
        for name, value in vars(self).items():
            allowed = vars(before)[name] + (MEMORY_SLACK if name == "memory" else 0)
            if value > allowed:
                found.append(f"{name} {value}, {vars(before)[name]} before")
        return found


class Process:
    """A client process and its pipe."""

    def __init__(self, stand: Stand, target: Callable[..., None], kind: Kind, *arguments: Any) -> None:
        self.kind, self._stand = kind, stand
        self.pipe, other = stand.context.Pipe()
        self.process = stand.context.Process(
            target=target, args=(other, str(stand.manager.runtime_dir), kind, *arguments), daemon=True
        )
        self.process.start()
        other.close()
        self.last = Report()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait_ready(self) -> Self:
        if not self.pipe.poll(25) or self.pipe.recv() != "ready":
            raise Failed("a client did not come into its state")
        return self

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ask(self, word: str, seconds: float) -> Report | None:
        """Its answer; None when none comes."""
        try:
            self.pipe.send(word)
            return self.receive(seconds)
        except (EOFError, OSError):
            return None

    def receive(self, seconds: float) -> Report | None:
        if not self.pipe.poll(seconds):
            return None
        answer: Report = self.pipe.recv()
        self.last = answer
        return answer

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


class Failed(Exception):
    """The round cannot go on; the text says why."""


class Stand:
    """`with Stand() as stand`: daemon, models and bystanders are there. Faults use everything that is public."""

    def __init__(self) -> None:
        self.dice = random.Random(0)
        self.folder = Path(tempfile.mkdtemp(prefix="sxc"))
        self.shortfalls: list[str] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.allowed: set[str] = set()
        self.latency = 0.0
        self.noisy, self.noise, self.together = 0, "", 0
        self.growth = 0
        self.before: Usage | None = None
        self.bystanders: dict[str, Process] = {}
        self._victims: list[Process] = []
        self._errors_seen: collections.Counter[str] = collections.Counter()
        self._clocks = {name: self.folder / f"clock-{name}" for name in ("daemon", "clients")}

    # ------------------------------------------------------------------ making and ending

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        answers.write_model(self.folder / "model")
        answers.write_tables(self.folder / "tables.npz")
        for path in self._clocks.values():
            path.write_bytes(bytes(16))
        shim = self.folder / "clock.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", HERE / "clock_shim.c", "-o", shim, "-ldl"], check=True)
        self._begin_clients(shim)
        models = "".join(self.model_config(format, format) for format in answers.FORMATS)
        self.manager = ServiceManager(
            self.folder, CONFIG + models, private_shm(SHM_BYTES),
            {"LD_PRELOAD": str(shim), "SYSHAX_CHAOS_CLOCK": str(self._clocks["daemon"])},
        )  # fmt: skip
        self.control = self.manager.control
        self.manager.start()
        for format in answers.FORMATS:
            self.manager.until_ready(format)

    def _begin_clients(self, shim: Path) -> None:
        """The process that clients are forked from has its environment from here."""
        os.environ[answers.TABLES_VARIABLE] = str(self.folder / "tables.npz")
        own = {
            "LD_PRELOAD": str(shim),
            "SYSHAX_CHAOS_CLOCK": str(self._clocks["clients"]),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["clients"])
        with _environment(own):
            first = self.context.Process(target=time.sleep, args=(0,))
            first.start()
        first.join()

    def begin_bystanders(self) -> None:
        for name, kind in BYSTANDERS.items():
            self.bystanders[name] = Process(self, bystander, kind).wait_ready()
        for process in self.bystanders.values():
            process.pipe.send("go")
        samples: list[float] = []
        deadline = time.monotonic() + 20
        while len(samples) < 300 and time.monotonic() < deadline:
            time.sleep(0.1)
            self._ask_bystanders()
            samples += self.bystanders["interactive"].last.latencies
        self.latency = statistics.median(samples)
        self._wait_for(lambda: len(self.sessions()) == len(self.bystanders))
        self.before = Usage.of(self.pid)

    def begin_round(self, dice: random.Random) -> None:
        self.dice, self.allowed, self.noise = dice, set(), ""

    def can_go_on(self) -> bool:
        """After a shortfall: the daemon and all bystanders are still there, perhaps after a restart."""
        if self.manager.process is not None and self.manager.process.poll() is not None:
            self.manager.start()
        return all(process.process.is_alive() for process in self.bystanders.values())

    def last_look(self) -> list[str]:
        """What the daemon's log and the whole run show."""
        log = self.manager.log()
        found = (
            ["a traceback in the daemon's log:\n" + log[log.index("Traceback") :][:3000]] if "Traceback" in log else []
        )
        code = self.manager.end()
        return found if code == 0 else [*found, f"the daemon's last stop gave {code}"]

    def end_bystanders(self) -> None:
        for name, process in self.bystanders.items():
            if process.ask("stop", 60) is None:
                self.shortfalls.append(f"bystander {name} did not stop")
            self._take(name, process)
            process.kill()
        self.bystanders = {}

    def close(self) -> None:
        for process in [*self.bystanders.values(), *self._victims]:
            process.kill()
        if hasattr(self, "manager"):
            self.manager.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------------- for the faults

    @property
    def pid(self) -> int:
        assert self.manager.process is not None
        return self.manager.process.pid

    def model_config(self, name: str, format: str) -> str:
        return f'[models.{name}]\npath = "{self.folder / "model"}"\nformat = "{format}"\nautoload = true\n'

    def sessions(self) -> list[Any]:
        return self.control.get("/v1/sessions", SessionsAnswer).sessions

    def attach(self, kind: Kind, state: str = "just attached") -> Process:
        process = Process(self, victim, kind, state)
        self._victims.append(process)
        return process.wait_ready()

    def attach_begin(self, kind: Kind, state: str = "just attached") -> Process:
        """As attach(), but returns while the process attaches."""
        process = Process(self, victim, kind, state)
        self._victims.append(process)
        return process

    def finish(self, process: Process, *allowed: str) -> None:
        """Judges what a victim's outstanding requests came to: right answers, or errors of these codes."""
        report = process.ask("finish", process.kind.timeout + 10)
        if report is None:
            self.shortfalls.append("a client's requests did not all end")
        else:
            self._judge("a victim", report, set(allowed))
        process.kill()

    def pause(self, least: float, most: float) -> None:
        time.sleep(self.dice.uniform(least, most))

    def jump(self, whose: str, realtime: float = 0.0, monotonic: float = 0.0) -> None:
        """Moves the clocks of the daemon or of all clients by seconds, from what they were."""
        with self._clocks[whose].open("r+b") as file:
            real, mono = struct.unpack("qq", file.read(16))
            file.seek(0)
            file.write(struct.pack("qq", real + int(realtime * 1e9), mono + int(monotonic * 1e9)))

    def refused(self, call: Callable[[], object], *codes: str) -> None:
        """The call must end in an error of one of these codes."""
        try:
            call()
        except SyshaxError as error:
            self.outcomes[error.code] += 1
            if error.code not in codes:
                self.shortfalls.append(f"{error.code} where {' or '.join(codes)} was due: {error}")
        else:
            self.shortfalls.append(f"no error where {' or '.join(codes)} was due")

    def progress(self, seconds: float = RECOVERY_SECONDS) -> None:
        """Every bystander gets another right answer within that time."""
        begun = self._ask_bystanders()
        self._wait_for(
            lambda: all(now > begun[name] for name, now in self._ask_bystanders().items()), seconds,
            "bystanders get no answers",
        )  # fmt: skip

    # ------------------------------------------------------------------------- watching

    def _wait_for(self, check: Callable[[], bool], seconds: float = 10.0, what: str = "it did not happen") -> None:
        deadline = time.monotonic() + seconds
        while not check():
            if time.monotonic() > deadline:
                self.shortfalls.append(f"{what} within {seconds:g} s")
                return
            time.sleep(0.02)

    def _ask_bystanders(self) -> dict[str, int]:
        """Right answers of each so far; what was wrong becomes a shortfall."""
        counts = {}
        for name, process in self.bystanders.items():
            before = process.last.right
            if process.ask("report", 5) is None:
                raise Failed(f"bystander {name} is gone or stuck")
            self.outcomes["right"] += process.last.right - before
            self._take(name, process)
            counts[name] = process.last.right
        return counts

    def _take(self, name: str, process: Process) -> None:
        report = process.last
        self.shortfalls += report.faults
        if report.oldest > process.kind.timeout + 2:
            self.shortfalls.append(f"bystander {name}: a call is out for {report.oldest:.1f} s")
        new = collections.Counter({f"{name}:{code}": count for code, count in report.errors.items()})
        for key, count in new.items():
            more = count - self._errors_seen[key]
            self._errors_seen[key] = count
            code = key.split(":")[1]
            self.outcomes[code] += more
            if more and code not in self.allowed:
                self.shortfalls.append(f"bystander {name} met {code}")

    def _judge(self, who: str, report: Report, allowed: set[str]) -> None:
        self.outcomes["right"] += report.right
        self.outcomes.update(report.errors)
        self.shortfalls += report.faults
        for code in report.errors:
            if code not in allowed:
                self.shortfalls.append(f"{who} met {code}")

    def settle(self) -> float:
        """Everything is as before the fault, within RECOVERY_SECONDS; gives the seconds that it took."""
        for process in self._victims:
            process.kill()
        self._victims = []
        begun, load = time.monotonic(), self._load()
        answered = self._ask_bystanders()
        recent: list[float] = []
        while True:
            time.sleep(0.03)
            counts = self._ask_bystanders()
            recent = (recent + self.bystanders["interactive"].last.latencies)[-20:]
            missing = self._missing(answered, counts, recent)
            seconds = time.monotonic() - begun
            if not missing:
                assert self.before is not None
                self.growth = max(self.growth, Usage.of(self.pid).memory - self.before.memory)
                self.noisy += seconds > RECOVERY_SECONDS
                return seconds
            others = (self._load() - load) / seconds
            if seconds > RECOVERY_SECONDS:
                self.noise = f" (others take {others:.1f} CPUs; {'; '.join(missing)})"
            if seconds > (RECOVERY_SECONDS if others < NOISY_CPUS else NOISY_SECONDS):
                late = [what for what in missing if others < NOISY_CPUS or not what.startswith("latency")]
                self.shortfalls += [f"{what}, {seconds:.1f} s after" for what in late]
                self.noisy += not late
                return seconds

    def _load(self) -> float:
        """CPU seconds of all programs that are none of this run, up to now."""
        own = sum(_cpu_seconds(pid) for pid in self._pids())
        return machine_seconds(Path("/proc/stat").read_text()) - own

    def _pids(self) -> list[int]:
        return [os.getpid(), self.pid, *(process.pid for process in self.bystanders.values())]

    def _missing(self, answered: dict[str, int], counts: dict[str, int], recent: list[float]) -> list[str]:
        assert self.before is not None
        missing = [f"bystander {name} has no new answer" for name, count in counts.items() if count <= answered[name]]
        if missing:
            return missing
        allowed = 3 * self.latency + 0.002
        if len(recent) < 10 or statistics.median(recent) > allowed:
            middle = statistics.median(recent) * 1e3 if recent else 0
            missing.append(f"latency {middle:.2f} ms of {len(recent)}, {self.latency * 1e3:.2f} ms before")
        missing += Usage.of(self.pid).beyond(self.before)
        for name, process in self.bystanders.items():
            if process.last.mappings != 1:
                missing.append(f"bystander {name} maps {process.last.mappings} sessions' memories")
        if missing:
            return missing
        begun = time.monotonic()
        sessions = self.control.get("/v1/status", StatusAnswer).sessions
        if sessions != len(self.bystanders):
            missing.append(f"{sessions} sessions for {len(self.bystanders)} clients")
        if time.monotonic() - begun > 1:
            missing.append("the control API takes more than 1 s")
        return missing


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
