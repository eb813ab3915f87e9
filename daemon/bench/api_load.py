"""The load of the API benchmark: one process with the fake worker and the clients, told what to do by lines of JSON.

Open loop: requests leave by a schedule that was made beforehand, whatever the answers do, and a latency counts from the
intended moment; so a server that stops for a while is blamed for all requests that should have come meanwhile. Closed
loop: each connection sends as soon as it has its answer. Streams: counted while a window is open, gaps between reads
that brought an event.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import struct
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import uvloop

from syshaxd.bench import api_wire as wire
from syshaxd.bench import api_worker
from syshaxd.bench.spinning import used_seconds

CONNECTS_AT_ONCE = 64
PATIENCE_SECONDS = 30.0
_ABSOLUTE = 1
"""TFD_TIMER_ABSTIME."""


def schedule(rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds after the start at which requests leave: random and independent, `rate` a second on average."""
    chance = random.Random(seed)
    wanted = round(rate * seconds)
    gaps = [chance.expovariate(1.0) for _ in range(wanted + 1)]
    scale = seconds / sum(gaps)
    return [moment * scale for moment in accumulate(gaps[:wanted])]


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that at least `part` of the values do not exceed. ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


class Client(asyncio.Protocol):
    """One keep-alive connection that gets whole answers."""

    transport: asyncio.Transport

    def __init__(self, on_answer: Callable[[Client, bool], None]) -> None:
        self._on_answer = on_answer
        self._data = b""
        self.intended = 0.0
        self.waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes, intended: float) -> None:
        """`intended`: when it should have left."""
        self.intended, self.waiting = intended, True
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._data = self._data + data if self._data else data
        if size := wire.whole_message(self._data):
            good = self._data.startswith(b"HTTP/1.1 200 ") and len(self._data) == size
            self._data, self.waiting = b"", False
            self._on_answer(self, good)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiting:
            self.waiting = False
            self._on_answer(self, False)


class Stream(asyncio.Protocol):
    """One connection with one stream; `events` and `gaps` grow while `window.open`."""

    transport: asyncio.Transport

    def __init__(self, data: bytes, window: Window) -> None:
        self._request, self._window = data, window
        self.started = False
        self.ended = False
        self.events = 0
        self._before = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if count := data.count(wire.EVENT_MARK):
            if not self.started:
                self.started = True
                self._window.started += 1
            now = time.perf_counter()
            if self._window.open:
                self.events += count
                self._window.events += count
                if self._before:
                    self._window.gaps.append(now - self._before)
            self._before = now

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        if not self._window.closing:
            self._window.lost += 1


class Window:
    """What all streams of one measurement counted."""

    def __init__(self) -> None:
        self.open = self.closing = False
        self.started = self.events = self.lost = 0
        self.gaps = array("d")


class Timer:
    """Moments of time.perf_counter() to the microsecond, which the loop's own timers (milliseconds) are not."""

    def __init__(self, moments: Sequence[float], call: Callable[[float], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._moments, self._call, self._next = moments, call, 0
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._due)
        self._arm()

    def _arm(self) -> None:
        moment = max(self._moments[self._next], 1e-9)
        seconds = int(moment)
        setting = struct.pack("qqqq", 0, 0, seconds, int((moment - seconds) * 1e9) or 1)
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, setting, None)

    def _due(self) -> None:
        os.read(self._fd, 8)
        now = time.perf_counter()
        while self._next < len(self._moments) and self._moments[self._next] <= now:
            self._call(self._moments[self._next])
            self._next += 1
        if self._next < len(self._moments):
            self._arm()
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self.done.set()


async def connected(port: int, count: int, make: Callable[[], Any]) -> list[Any]:
    """`count` connections, some at a time."""
    loop = asyncio.get_running_loop()
    made: list[Any] = []
    while len(made) < count:
        more = min(CONNECTS_AT_ONCE, count - len(made))
        pairs = await asyncio.gather(*(loop.create_connection(make, "127.0.0.1", port) for _ in range(more)))
        made += [protocol for _, protocol in pairs]
    return made


async def open_loop(port: int, rate: float, seconds: float, seed: int, connections: int = 32) -> dict[str, Any]:
    """Latencies in seconds of requests by `schedule`, and how late they left."""
    loop, data = asyncio.get_running_loop(), wire.request()
    latencies, lateness = array("d"), array("d")
    failed, idle, opening = 0, [], set[asyncio.Task[None]]()

    def on_answer(client: Client, good: bool) -> None:
        nonlocal failed
        if good:
            latencies.append(time.perf_counter() - client.intended)
            idle.append(client)
        else:
            failed += 1

    async def on_new(intended: float) -> None:
        _, client = await loop.create_connection(lambda: Client(on_answer), "127.0.0.1", port)
        client.send(data, intended)

    def leave(intended: float) -> None:
        lateness.append(time.perf_counter() - intended)
        if idle:
            idle.pop().send(data, intended)
        else:
            opening.add(asyncio.create_task(on_new(intended)))

    idle += await connected(port, connections, lambda: Client(on_answer))
    start = time.perf_counter() + 0.05
    moments = [start + after for after in schedule(rate, seconds, seed)]
    await Timer(moments, leave).done.wait()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(latencies) + failed < len(moments):  # noqa: ASYNC110 - a callback counts
            await asyncio.sleep(0.01)
    for client in idle:
        client.transport.close()
    return {"latencies": list(latencies), "lateness": list(lateness), "failed": failed}


async def closed_loop(ports: Sequence[int], connections: int, seconds: float, pids: Sequence[int]) -> dict[str, Any]:
    """Requests a second of so many connections to each port, each with one request under way."""
    data, answered, failed, running = wire.request(), 0, 0, True

    def on_answer(client: Client, good: bool) -> None:
        nonlocal answered, failed
        answered += good
        failed += running and not good
        if running and good:
            client.send(data, 0.0)

    clients = [c for port in ports for c in await connected(port, connections, lambda: Client(on_answer))]
    for client in clients:
        client.send(data, 0.0)
    await asyncio.sleep(min(0.3, seconds / 4))
    before, used, start = answered, cpu_of(pids), time.perf_counter()
    await asyncio.sleep(seconds)
    took, cpu, count = time.perf_counter() - start, cpu_of(pids) - used, answered - before
    running = False
    for client in clients:
        client.transport.abort()
    return {"per_second": count / took, "cpu_us": cpu / max(count, 1) * 1e6, "failed": failed}


async def streams(port: int, count: int, gap_ms: float, seconds: float, pids: Sequence[int]) -> dict[str, Any]:
    """So many streams at once: how many began, events a second, gaps, CPU time and memory of `pids`."""
    window, data = Window(), wire.request(stream=True, gap_ms=gap_ms)
    resident = resident_bytes(pids)
    opened: list[Stream] = await connected(port, count, lambda: Stream(data, window))
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while window.started < count and time.perf_counter() < deadline:  # noqa: ASYNC110 - a callback counts
        await asyncio.sleep(0.02)
    await asyncio.sleep(min(0.5, seconds / 4))
    window.open, used, start = True, cpu_of(pids), time.perf_counter()
    await asyncio.sleep(seconds)
    window.open = False
    took, cpu = time.perf_counter() - start, cpu_of(pids) - used
    grown = resident_bytes(pids)
    window.closing = True
    for stream in opened:
        stream.transport.abort()
    gaps = window.gaps.tolist()
    return {
        "started": window.started,
        "lost": window.lost,
        "silent": sum(not stream.events for stream in opened),
        "events_per_second": window.events / took,
        "cpu_us": cpu / max(window.events, 1) * 1e6,
        "busy": cpu / took,
        "gap_p50_ms": percentile(gaps, 0.5) * 1e3 if gaps else 0.0,
        "gap_p99_ms": percentile(gaps, 0.99) * 1e3 if gaps else 0.0,
        "resident_mib": grown / 2**20,
        "growth_mib": (grown - resident) / 2**20,
    }


def cpu_of(pids: Sequence[int]) -> float:
    return sum(used_seconds(pid) for pid in pids)


def resident_bytes(pids: Sequence[int]) -> int:
    """Memory of these processes in RAM, shared pages counted in each."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123 - in a measured loop
            total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


MEASURES: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "open_loop": open_loop,
    "closed_loop": closed_loop,
    "streams": streams,
}


async def main() -> None:
    server = await api_worker.serve()
    print(api_worker.port_of(server), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        words = json.loads(line)
        result = await MEASURES[words.pop("measure")](**words)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
