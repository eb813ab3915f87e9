"""Load through syshax-api while its workers are killed, stopped, restarted and sick; the verdict over every request.

    python tests/frontend/storm.py [--seconds 180] [--seed 1] [--processes 1]

Every process is real: the front-end, three workers (`storm_worker`), sockets between them. Clients ask for answers that
follow from the request, streaming or not; some leave in the middle. The verdict knows when each fault was and holds
every request against the contract: what could be saved is answered; what could not ends in a proper OpenAI error;
nothing is wrong, cut without notice or left hanging. Afterwards every counter is zero, no descriptor or memory is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import aiohttp
from storm_worker import DONE, MODEL, event, serve, whole

WORKERS, CLIENTS, STREAMS = 3, 24, 0.6
ROOM = 9
"""Requests of one worker: enough for all clients while all three are there, so that they wait when one is not."""
HANG_SECONDS = 40.0
KINDS = (("kill", "stop", "term", "sick"), (4, 4, 1, 1))
IDLE_SECONDS = 1.5
BACK_SECONDS = 1.0
"""How soon a worker that listens again must be used; the slack for a busy machine is the storm's own."""
SLACK_SECONDS = 1.5
KEPT = 10
"""Connections to a worker that stay open when idle: checks take turns on them, and each then has 4 s."""
CONFIG = """port = 0
workers = [{workers}]
{processes}
[queue]
requests_per_worker = {room}
[daemon]
view_socket = ""
[timeouts]
first_byte_seconds = 30
idle_seconds = {idle}
[health]
interval_seconds = 1
retry_seconds = 0.1
timeout_seconds = 1.5
[logging]
requests = false
"""


@dataclass
class Fault:
    kind: str
    worker: int
    begin: float
    end: float = float("inf")
    """When the worker was whole again."""

    @property
    def cuts(self) -> bool:
        """Whether it breaks connections."""
        return self.kind in ("kill", "term")

    def within(self, begin: float, end: float) -> bool:
        return self.begin <= end and self.end >= begin


@dataclass
class Request:
    seed: int
    stream: bool
    route: str
    tokens: int
    pause: float
    leaves_after: float | None
    begin: float = 0.0
    end: float = 0.0
    outcome: str = ""
    """right, left, or an error's code."""
    some: bool = False
    """Whether a byte of the answer had come."""
    faults: list[str] = field(default_factory=list)

    @property
    def repeatable(self) -> bool:
        return self.route != "responses"


def judge(request: Request, faults: list[Fault]) -> str:
    """Why this outcome breaks the contract; "" when it does not."""
    if request.faults:
        return "; ".join(request.faults)
    if request.outcome in ("right", "left"):
        return ""
    around = [fault for fault in faults if fault.within(request.begin - 0.1, request.end)]
    begun = [fault for fault in around if fault.cuts and fault.begin >= request.begin - 0.1]
    if request.outcome == "worker_timeout":
        long = any(fault.kind == "stop" and fault.end - fault.begin >= IDLE_SECONDS * 0.5 for fault in around)
        return "" if long else "timed out although no worker was stopped for so long"
    if request.outcome == "worker_failed":
        if not begun:
            return "failed although no worker was killed"
        savable = not request.some and request.repeatable and len(begun) < 2 and not _none_left(around, begun[0].begin)
        return "lost although another worker could have answered" if savable else ""
    if request.outcome in ("not_ready", "overloaded"):
        steps = [request.begin, request.end, *(fault.begin for fault in around)]
        return "" if any(_none_left(around, step) for step in steps) else f"{request.outcome} although a worker was up"
    return f"an unexpected end: {request.outcome}"


def _none_left(faults: list[Fault], when: float) -> bool:
    away = {fault.worker for fault in faults if fault.begin - 0.1 <= when <= fault.end + BACK_SECONDS + SLACK_SECONDS}
    return len(away) == WORKERS


class Workers:
    """The worker processes, each on a port that it keeps over restarts."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["storm_worker"])
        self.ports = [0] * WORKERS
        self.processes: list[BaseProcess | None] = [None] * WORKERS

    async def start(self, number: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(self.ports[number], theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes[number] = process
        self.ports[number] = await asyncio.to_thread(ours.recv)
        ours.close()

    def signal(self, number: int, what: signal.Signals) -> None:
        process = self.processes[number]
        assert process is not None and process.pid is not None
        os.kill(process.pid, what)

    async def end(self, number: int, what: signal.Signals) -> None:
        self.signal(number, what)
        process = self.processes[number]
        assert process is not None
        await asyncio.to_thread(process.join)
        process.close()
        self.processes[number] = None

    async def close(self) -> None:
        for number, process in enumerate(self.processes):
            if process is not None:
                self.signal(number, signal.SIGCONT)
                await self.end(number, signal.SIGKILL)


class Storm:
    """One run. `faults` and `requests` are its record."""

    def __init__(self, seconds: float, seed: int, processes: int = 1, clients: int = CLIENTS) -> None:
        self.seconds, self.processes, self.clients = seconds, processes, clients
        self.random = random.Random(seed)
        self.first = ["stop", "kill"]  # a short run has these whatever its luck
        self.workers = Workers()
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.notes: list[str] = []
        self.url = ""
        self.back: list[float] = []
        """Seconds from a worker's listening until the front-end called it ready."""
        self._api: asyncio.subprocess.Process | None = None

    async def run(self) -> list[str]:
        """What broke the contract, one line each."""
        with TemporaryDirectory(prefix="syshax-storm-") as folder:
            try:
                for number in range(WORKERS):
                    await self.workers.start(number)
                await self._start_api(Path(folder))
                async with aiohttp.ClientSession(self.url) as watch:
                    return await self._weather(watch)
            finally:
                if self._api is not None and self._api.returncode is None:
                    self._api.kill()
                    await self._api.wait()
                await self.workers.close()

    async def _start_api(self, folder: Path) -> None:
        urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in self.workers.ports)
        processes = f"processes = {self.processes}" if self.processes > 1 else ""
        (folder / "api.toml").write_text(CONFIG.format(workers=urls, processes=processes, idle=IDLE_SECONDS, room=ROOM))
        log = folder / "log"
        with log.open("wb") as out:
            self._api = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "syshaxd.frontend", "--config", str(folder / "api.toml")), stderr=out
            )
        async with asyncio.timeout(30):
            while "listening on " not in (text := log.read_text()) or text.count(" is ready: ") < WORKERS:
                assert self._api.returncode is None, text
                await asyncio.sleep(0.05)
        self.url = text.split("listening on ")[1].split()[0]
        self._log = log

    async def _weather(self, watch: aiohttp.ClientSession) -> list[str]:
        files, _ = self._held()
        await self._load(2)
        before = files, self._held()[1]
        load = asyncio.create_task(self._load(self.seconds))
        await self._faults(watch, monotonic() + self.seconds - 3)
        await load
        wrong = [f"{request}: {why}" for request in self.requests if (why := judge(request, self.faults))]
        wrong += self.notes
        wrong += await self._left_over(watch, before)
        text = self._log.read_text(errors="replace")
        if "Traceback" in text:
            wrong.append("a traceback in the log:\n" + text[text.index("Traceback") :][:3000])
        return wrong

    async def _load(self, seconds: float) -> None:
        connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(HANG_SECONDS)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=limit) as session:
            until = monotonic() + seconds
            await asyncio.gather(*(self._client(session, until) for _ in range(self.clients)))

    def _held(self) -> tuple[int, int]:
        """(descriptors, PSS bytes) of the front-end, its children included."""
        assert self._api is not None
        pids, todo = [], [self._api.pid]
        while todo:
            pids.append(todo.pop())
            for task in Path(f"/proc/{pids[-1]}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
        rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids]
        kib = sum(int(line.split()[1]) for lines in rollups for line in lines if line.startswith("Pss:"))
        return files, kib << 10

    async def _left_over(self, watch: aiohttp.ClientSession, before: tuple[int, int]) -> list[str]:
        """Counters, descriptors and memory once nothing is asked any more and idle connections have been closed."""
        for _ in range(80):
            found, after = await self._counters(watch), self._held()
            if after[0] > before[0] + KEPT * WORKERS * self.processes:
                found.append(f"descriptors: {before[0]} before, {after[0]} after")
            if not found:
                break
            await asyncio.sleep(0.1)
        self.held = before, after
        if after[1] > before[1] * 1.15 + (6 << 20):
            found.append(f"memory: {before[1] >> 20} MiB before, {after[1] >> 20} after")
        return found

    async def _counters(self, session: aiohttp.ClientSession) -> list[str]:
        found = []
        async with session.get("/ready") as response:
            state = await response.json()
        found += [f"not zero: {worker}" for worker in state["workers"] if worker["outstanding"]]
        found += [f"not ready: {worker}" for worker in state["workers"] if not worker["ready"]]
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        gauges = [line for line in lines if not line.startswith("#") and _counts_now(line)]
        found += [f"not zero: {line}" for line in gauges if float(line.rsplit(" ", 1)[1])]
        if not gauges:
            found.append("no gauge of what is in progress in /metrics")
        for port in self.workers.ports:
            async with session.get(f"http://127.0.0.1:{port}/stats") as response:
                if (stats := await response.json())["active"]:
                    found.append(f"a worker still computes for nobody: {stats}")
        return found

    async def _faults(self, session: aiohttp.ClientSession, until: float) -> None:
        running: set[asyncio.Task[None]] = set()
        while monotonic() < until:
            await asyncio.sleep(self.random.uniform(0.3, 1.5))
            free = [n for n in range(WORKERS) if not any(f.worker == n and f.end > monotonic() for f in self.faults)]
            at_once = min(self.random.choices((1, 2, 3), (16, 3, 1))[0], len(free))
            for number in self.random.sample(free, at_once):
                kind = self.first.pop() if self.first else self.random.choices(*KINDS)[0]
                fault = Fault(kind, number, monotonic())
                self.faults.append(fault)
                running.add(asyncio.create_task(self._fault(session, fault, self.random.uniform(0.2, 2.5))))
        for task in running:
            await task

    async def _fault(self, session: aiohttp.ClientSession, fault: Fault, seconds: float) -> None:
        workers, number = self.workers, fault.worker
        if fault.kind == "stop":
            workers.signal(number, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            workers.signal(number, signal.SIGCONT)
        elif fault.kind == "sick":
            await (await session.get(f"http://127.0.0.1:{workers.ports[number]}/health?sick={seconds}")).read()
            await asyncio.sleep(seconds)
        else:
            await workers.end(number, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            await asyncio.sleep(seconds)
            await workers.start(number)
        begin = monotonic()
        while not await self._ready(session, number):
            if monotonic() - begin > BACK_SECONDS + SLACK_SECONDS:
                self.notes.append(f"worker {number} is not used {monotonic() - begin:.1f} s after its {fault.kind}")
                break
            await asyncio.sleep(0.02)
        self.back.append(monotonic() - begin)
        fault.end = monotonic()

    async def _ready(self, session: aiohttp.ClientSession, number: int) -> bool:
        async with session.get("/ready") as response:
            listed = (await response.json())["workers"]
        return any(w["ready"] for w in listed if w["worker"].endswith(f":{self.workers.ports[number]}"))

    async def _client(self, session: aiohttp.ClientSession, until: float) -> None:
        while monotonic() < until:
            draw = self.random
            request = Request(
                seed=draw.randrange(1 << 30),
                stream=draw.random() < STREAMS,
                route=draw.choices(("chat/completions", "completions", "responses"), (6, 3, 1))[0],
                tokens=draw.choice((1, 5, 20, 20, 60)),
                pause=draw.choice((0.001, 0.01, 0.02)),
                leaves_after=draw.uniform(0, 0.5) if draw.random() < 0.1 else None,
            )
            self.requests.append(request)
            request.begin = monotonic()
            try:
                async with asyncio.timeout(request.leaves_after):
                    await self._ask(session, request)
            except TimeoutError:
                if request.leaves_after is None or monotonic() - request.begin > HANG_SECONDS / 2:
                    request.faults.append("hangs")
                request.outcome = "left"
            except aiohttp.ClientError as error:
                request.faults.append(f"cut without notice: {error!r}")
            request.end = monotonic()
            await asyncio.sleep(draw.uniform(0, 0.05))

    async def _ask(self, session: aiohttp.ClientSession, request: Request) -> None:
        body = {"model": MODEL, "stream": request.stream, "seed": request.seed}
        body |= {"tokens": request.tokens, "pause": request.pause}
        async with session.post(f"/v1/{request.route}", json=body) as response:
            request.some = response.status == 200
            content = await response.read()
        if response.status != 200:
            request.outcome = self._error(request, content)
        elif request.stream:
            self._check_stream(request, content)
        else:
            request.outcome = "right"
            if content != whole(request.seed, request.tokens):
                request.faults.append(f"wrong: {content[:200]!r}")

    def _check_stream(self, request: Request, content: bytes) -> None:
        expected = b"".join(event(request.seed, number) for number in range(request.tokens)) + DONE
        request.outcome = "right"
        if content == expected:
            return
        start = content.rfind(b'data: {"error"')
        if start < 0 or not content.endswith(b"\n\n"):
            request.faults.append(f"a stream ends without notice: …{content[-200:]!r}")
            return
        kept = content[:start].removesuffix(b"\n\n") if not expected.startswith(content[:start]) else content[:start]
        if not expected.startswith(kept):
            request.faults.append(f"wrong before its error: …{kept[-200:]!r}")
        request.outcome = self._error(request, content[start:].removeprefix(b"data: "))

    def _error(self, request: Request, content: bytes) -> str:
        try:
            error: dict[str, Any] = json.loads(content)["error"]
        except (ValueError, KeyError, TypeError):
            request.faults.append(f"not an OpenAI error: {content[:200]!r}")
            return "?"
        if set(error) != {"message", "type", "param", "code"} or "127.0.0.1" in error["message"]:
            request.faults.append(f"a bad error object: {error}")
        return str(error["code"])

    def summary(self) -> str:
        outcomes = Counter(("stream " if r.stream else "whole ") + r.outcome for r in self.requests)
        kinds = Counter(fault.kind for fault in self.faults)
        (files, memory), (files_after, memory_after) = self.held
        return (
            f"{len(self.requests)} requests: {dict(sorted(outcomes.items()))}; faults: {dict(kinds)}; a worker is used "
            f"again after {max(self.back, default=0):.2f} s at most; descriptors {files} -> {files_after}, "
            f"memory {memory / 2**20:.1f} -> {memory_after / 2**20:.1f} MiB"
        )


def _counts_now(line: str) -> bool:
    name = line.split("{")[0].split(" ")[0]
    return name.endswith(("_in_flight", "_running", "_waiting", "_queued")) or "in_progress" in name


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    options = parser.parse_args()
    storm = Storm(options.seconds, options.seed, options.processes, options.clients)
    wrong = asyncio.run(storm.run())
    print(storm.summary())
    for line in wrong[:20]:
        print(line)
    print(f"FAILED: {len(wrong)} faults" if wrong else "every request ended as it must")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
