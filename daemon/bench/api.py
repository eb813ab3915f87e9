"""`syshaxd bench api`: syshax-api against a worker that answers at once, beside a bare pass-through that is measured in
the same rounds and in the same way; held against [[api]] of targets.toml.

Owns the processes, which CPUs they take (the measured one alone on the last, load and worker on the first), the rounds
and the verdict; the measuring is `api_load`'s.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syshax.errors import InternalError, InvalidArgumentError
from syshaxd.bench import api_wire, processes
from syshaxd.bench.api_load import percentile
from syshaxd.bench.targets import TABLE
from syshaxd.bench.timing import QUIET_CPUS, machine_seconds
from syshaxd.frontend.config import ApiConfig

PARTS = ("latency", "closed", "full", "paced", "many", "processes")
RATE, CONNECTIONS, FULL_STREAMS = 200.0, 32, 32
PACED_STREAMS, MANY_STREAMS, GAP_MS = 300, 2000, 20.0
CPUS_FOR_PROCESSES = 4
"""Two front-ends, and load and worker that keep up with them."""
LOST = "lost answers or streams: the figures mean nothing"
START_SECONDS = 30.0


@dataclass(frozen=True)
class Plan:
    """How often and how long."""

    rounds: int
    seconds: float
    many_seconds: float
    many_rounds: int


FULL, QUICK = Plan(7, 3.0, 8.0, 3), Plan(3, 1.5, 4.0, 1)


@dataclass
class Server:
    """A measured process, or several of them behind one port."""

    name: str
    port: int
    pids: list[int]


class Load:
    """The process of load and worker."""

    def __init__(self, stack: ExitStack, cpu: int) -> None:
        self._process = start(stack, cpu, "syshaxd.bench.api_load")
        self.worker_port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InternalError("the benchmark's load ended", "its messages stand above")
        return line

    def measure(self, name: str, **words: Any) -> dict[str, Any]:
        """The result of one of api_load's MEASURES. InternalError when an answer was lost."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"measure": name, **words}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        if found.get("failed") or found.get("lost"):
            raise InternalError(f"{name}, port {words.get('port') or words['ports']}: {found} {LOST}")
        return found


def start(
    stack: ExitStack, cpu: int | None, module: str, *words: str, log: Path | None = None
) -> subprocess.Popen[str]:
    """A Python process on one CPU (None: on all that may be used); its standard error goes to `log` or to ours."""
    with log.open("w") if log else nullcontext() as file:
        process = processes.start(stack, module, *words, stderr=file)
    if cpu is not None:
        os.sched_setaffinity(process.pid, {cpu})
    return process


def start_bare(stack: ExitStack, cpu: int | None, worker: str, folder: Path) -> Server:
    process = start(stack, cpu, "syshaxd.bench.api_bare", worker, log=folder / "bare.log")
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise InternalError(f"the bare pass-through did not start: {(folder / 'bare.log').read_text()[-400:]}")
    return Server("bare", int(line), [process.pid])


def start_ours(stack: ExitStack, cpu: int | None, worker: str, folder: Path, processes: int = 1) -> Server:
    """syshax-api as a user starts it, a line for each request included (to a file)."""
    many = f"processes = {processes}\n" if processes > 1 else ""
    config, log = folder / f"api-{processes}.toml", folder / f"api-{processes}.log"
    config.write_text(f'port = 0\nworkers = ["{worker}"]\n{many}', encoding="utf-8")
    process = start(stack, cpu, "syshaxd.frontend", "--config", str(config), log=log)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(encoding="utf-8")
        if "listening on " in text:
            port = int(text.split("listening on ")[1].split()[0].rstrip(",").rsplit(":", 1)[1])
            if is_ready(port):
                return Server("ours", port, [process.pid, *children(process.pid)])
        time.sleep(0.05)
    raise InternalError(f"syshax-api did not start: {log.read_text(encoding='utf-8')[-400:]}")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class OtherLoad:
    """CPUs that processes which are not the benchmark's kept busy."""

    def __init__(self) -> None:
        self._begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        ours = os.times()
        running = 0.0
        for pid in children(os.getpid()):
            for task in [pid, *children(pid)]:
                running += sum(map(int, Path(f"/proc/{task}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) / 100
        stat = Path("/proc/stat").read_text(encoding="ascii")
        return machine_seconds(stat) - running - sum(ours[:4]), time.monotonic()

    def cpus(self) -> float:
        used, now = self._read()
        return max(0.0, (used - self._begin[0]) / max(now - self._begin[1], 1e-9))


class Bench:
    """One run: every part measures bare and ours in turns, and keeps each round."""

    def __init__(self, stack: ExitStack, plan: Plan, say: Callable[[str], None]) -> None:
        self._stack, self._plan, self._say = stack, plan, say
        allowed = sorted(os.sched_getaffinity(0))
        if len(allowed) < 2:
            raise InvalidArgumentError("the API benchmark needs two CPUs", "one for the front-end, one for its load")
        self._cpus = allowed
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sx")))
        self._load = Load(stack, allowed[0])
        self._worker = f"http://127.0.0.1:{self._load.worker_port}"
        self.rounds: dict[str, list[dict[str, Any]]] = {}

    @contextmanager
    def _servers(self) -> Iterator[list[Server]]:
        with ExitStack() as stack:
            bare = start_bare(stack, self._cpus[-1], self._worker, self._folder)
            yield [bare, start_ours(stack, self._cpus[-1], self._worker, self._folder)]

    def run(self, part: str) -> dict[str, Any]:
        """The figures of one part."""
        self._say(DESCRIPTIONS[part])
        figures: dict[str, Any] = getattr(self, f"_{part}")()
        return figures

    def _in_turns(self, part: str, measure: Callable[[Server], Mapping[str, Any]], times: int = 0) -> None:
        """Who begins changes from round to round; a first round only warms up where there are several."""
        kept = self.rounds[part] = []
        times = times or self._plan.rounds
        with self._servers() as servers:
            for number in range(times + (times > 1)):
                found = {server.name: measure(server) for server in (servers if number % 2 else servers[::-1])}
                if number or times == 1:
                    kept.append(found)

    def _median(self, part: str, name: str, field: str) -> float:
        return float(statistics.median(each[name][field] for each in self.rounds[part]))

    def _ratio(self, part: str, field: str) -> float:
        return float(statistics.median(each["ours"][field] / each["bare"][field] for each in self.rounds[part]))

    def _latency(self) -> dict[str, Any]:
        direct = Server("direct", self._load.worker_port, [])

        def measure(server: Server) -> dict[str, Any]:
            words = {"rate": RATE, "seconds": self._plan.seconds, "seed": len(self.rounds["latency"])}
            return {
                where.name: latency_of(self._load.measure("open_loop", port=where.port, **words))
                for where in (server, direct)
            }

        self._in_turns("latency", measure)
        figures: dict[str, Any] = {}
        for name in ("bare", "ours"):
            for field in ("p50_ms", "p99_ms"):
                added = [each[name][name][field] - each[name]["direct"][field] for each in self.rounds["latency"]]
                figures[f"{name}_added_{field}"] = statistics.median(added)
        return figures

    def _closed(self) -> dict[str, Any]:
        def measure(server: Server) -> dict[str, Any]:
            return self._load.measure(
                "closed_loop",
                ports=[server.port],
                connections=CONNECTIONS,
                seconds=self._plan.seconds,
                pids=server.pids,
            )

        self._in_turns("closed", measure)
        figures = {f"{name}_requests": self._median("closed", name, "per_second") for name in ("bare", "ours")}
        cpu = {f"{name}_request_cpu_us": self._median("closed", name, "cpu_us") for name in ("bare", "ours")}
        return {**figures, **cpu, "closed_ratio": self._ratio("closed", "per_second")}

    def _streams(self, part: str, count: int, gap_ms: float, seconds: float, times: int = 0) -> dict[str, Any]:
        def measure(server: Server) -> dict[str, Any]:
            return self._load.measure(
                "streams", port=server.port, count=count, gap_ms=gap_ms, seconds=seconds, pids=server.pids
            )

        self._in_turns(part, measure, times)
        fields = ("events_per_second", "cpu_us", "busy", "gap_p50_ms", "gap_p99_ms", "resident_mib", "growth_mib")
        figures: dict[str, Any] = {
            f"{name}_{part}_{field}": self._median(part, name, field) for name in ("bare", "ours") for field in fields
        }
        started = [
            min(each[name]["started"] - each[name]["silent"] for each in self.rounds[part]) for name in ("ours",)
        ]
        return {**figures, f"{part}_started": started[0] / count}

    def _full(self) -> dict[str, Any]:
        figures = self._streams("full", FULL_STREAMS, 0.0, self._plan.seconds)
        return {**figures, "full_ratio": self._ratio("full", "events_per_second")}

    def _paced(self) -> dict[str, Any]:
        figures = self._streams("paced", PACED_STREAMS, GAP_MS, self._plan.seconds)
        return {**figures, "event_cpu_ratio": self._ratio("paced", "cpu_us")}

    def _many(self) -> dict[str, Any]:
        figures = self._streams("many", MANY_STREAMS, GAP_MS, self._plan.many_seconds, self._plan.many_rounds)
        limit = max(GAP_MS + 100.0, 1.2 * figures["bare_many_gap_p99_ms"])
        return {**figures, "many_gap_share": figures["ours_many_gap_p99_ms"] / limit, "many_gap_limit_ms": limit}

    def _processes(self) -> dict[str, Any]:
        """Two processes against one; where CPUs are too few, two bare pass-throughs against one are the limit."""
        if "processes" not in ApiConfig.model_fields:
            return {}
        words = {"seconds": self._plan.seconds, "pids": []}
        kept = self.rounds["processes"] = []
        with ExitStack() as stack:
            bare = [start_bare(stack, None, self._worker, self._folder) for _ in range(2)]
            ours = [start_ours(stack, None, self._worker, self._folder, count) for count in (1, 2)]
            groups = {"bare_1": bare[:1], "bare_2": bare, "ours_1": ours[:1], "ours_2": ours[1:]}
            for _ in range(self._plan.rounds):
                found = {}
                for name, servers in groups.items():
                    ports = [server.port for server in servers]
                    each = 2 * CONNECTIONS // len(ports)
                    found[name] = self._load.measure("closed_loop", ports=ports, connections=each, **words)
                kept.append(found)
        ratios = {
            name: statistics.median(each[f"{name}_2"]["per_second"] / each[f"{name}_1"]["per_second"] for each in kept)
            for name in ("bare", "ours")
        }
        enough = len(self._cpus) >= CPUS_FOR_PROCESSES
        asked = 1.7 if enough else min(1.7, 0.95 * ratios["bare"])
        shares = {"two_processes": ratios["ours"], "two_bare": ratios["bare"], "two_asked": asked}
        return {**shares, "processes_share": ratios["ours"] / asked, "enough_cpus": enough}


DESCRIPTIONS = {
    "latency": f"{RATE:.0f} requests a second, open loop: what the front-end adds",
    "closed": f"closed loop, {CONNECTIONS} connections",
    "full": f"{FULL_STREAMS} streams at full speed",
    "paced": f"{PACED_STREAMS} streams with an event each {GAP_MS:g} ms: CPU time of an event",
    "many": f"{MANY_STREAMS} streams with an event each {GAP_MS:g} ms: all served, gaps, memory",
    "processes": "two processes against one",
}


def latency_of(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "curve_ms": [percentile(found["latencies"], part / 200) * 1e3 for part in range(201)],
        "p50_ms": percentile(found["latencies"], 0.5) * 1e3,
        "p99_ms": percentile(found["latencies"], 0.99) * 1e3,
        "late_p99_ms": percentile(found["lateness"], 0.99) * 1e3,
    }


def run(parts: Sequence[str], plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """The figures of the wanted parts, `rounds`, `verdicts`, `line` and `falls_short`. Raises SyshaxError."""
    if unknown := [part for part in parts if part not in PARTS]:
        raise InvalidArgumentError(f'part "{unknown[0]}" is none of {", ".join(PARTS)}')
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        bench, others = Bench(stack, plan, say), OtherLoad()
        for part in parts:
            figures |= bench.run(part)
        busy = others.cpus()
    verdicts = judge(read_targets(), figures)
    return {
        "started": started,
        "model": api_wire.MODEL,
        "figures": figures,
        "rounds": bench.rounds,
        "others": busy,
        "quiet": busy <= QUIET_CPUS,
        "verdicts": verdicts,
        "line": last_line(verdicts),
        "falls_short": any(not verdict["met"] for verdict in verdicts),
    }


def read_targets(file: Path = TABLE) -> list[dict[str, Any]]:
    """Rows of [[api]]: name, figure, at_most or at_least."""
    rows: list[dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))["api"]
    return rows


def judge(targets: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One verdict for every target whose figure was measured."""
    verdicts = []
    for target in targets:
        if target["figure"] not in figures:
            continue
        value = float(figures[target["figure"]])
        met = value <= target["at_most"] if "at_most" in target else value >= target["at_least"]
        bound = {key: target[key] for key in ("at_most", "at_least") if key in target}
        beside = {name: round(float(figures[name]), 3) for name in target.get("beside", ())}
        verdicts.append({"target": target["name"], "value": value, **bound, "met": met, "beside": beside})
    return verdicts


def bound_text(verdict: Mapping[str, Any]) -> str:
    return f"at most {verdict['at_most']:g}" if "at_most" in verdict else f"at least {verdict['at_least']:g}"


def last_line(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """One line for people: what falls short, or that nothing does."""
    short = [verdict for verdict in verdicts if not verdict["met"]]
    if not short:
        return f"bench api: nothing falls short in {len(verdicts)} comparisons"
    found = (f"{verdict['target']}: {verdict['value']:.3g}, {bound_text(verdict)}" for verdict in short)
    return f"bench api: {len(short)} of {len(verdicts)} comparisons fall short: {'; '.join(found)}"
