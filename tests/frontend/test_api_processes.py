"""`processes = N`: equal shares, right sums, and what is lost when a process dies, hangs or runs out of descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from api_program import Api, api
from front_fixtures import FakeWorker, Setup, bearer, streaming, until, write_keys

EVENT = b"data: 1\n\n"
BODY = {"model": "m"}


@asynccontextmanager
async def several(
    setup: Setup, worker: FakeWorker, more: str = "", processes: int = 2, keys: Path | None = None, **options: object
) -> AsyncIterator[Api]:
    config = setup.folder / "api.toml"
    head = f'port = 0\nprocesses = {processes}\nworkers = ["{worker.url}"]\nkeys_file = "{keys or ""}"\n'
    config.write_text(f'{head}[daemon]\nview_socket = ""\n[timeouts]\ndrain_seconds = 5\n{more}')
    async with api("--config", str(config), **options) as server:  # type: ignore[arg-type]
        await server.ready()
        yield server


async def one_request(server: Api, path: str = "/v1/completions", key: str = "") -> tuple[int, bytes]:
    """On a connection of its own."""
    url, headers = f"{server.url}{path}", bearer(key) if key else {}
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        posts = path == "/v1/completions"
        asked = session.post(url, json=BODY, headers=headers) if posts else session.get(url, headers=headers)
        async with asked as response:
            return response.status, await response.read()


async def metric(server: Api, name: str) -> float:
    """The sum over its labels."""
    _, text = await one_request(server, "/metrics")
    found = [line for line in text.decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def descriptors(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/fd").iterdir())


def allow_descriptors(pid: int, more: bool) -> None:
    """As many as it likes, or none that it has not got."""
    taken = {int(path.name) for path in descriptors(pid)}
    free = next(number for number in range(4096) if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096 if more else free, 4096))


@contextmanager
def notifications(path: Path) -> Iterator[Callable[[], list[str]]]:
    """A service manager's socket, and what has been said there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.setblocking(False)
        told: list[str] = []

        def read() -> list[str]:
            with suppress(BlockingIOError):
                while True:
                    told.extend(listening.recv(4096).decode().splitlines())
            return told

        yield read


async def clients_of(server: Api, number: int) -> list[asyncio.StreamWriter]:
    """So many connections that say nothing."""
    return [(await asyncio.open_connection(*server.address()))[1] for _ in range(number)]


async def test_shares_are_equal_and_limits_and_metrics_are_those_of_all(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(EVENT, forever=True)
    async with several(setup, worker, "[limits]\nrequests = 10\nconnections = 40\n") as server:
        before = [len(descriptors(pid)) for pid in server.children()]
        idle = await clients_of(server, 20)
        await asyncio.sleep(0.2)
        grown = [len(descriptors(pid)) - old for pid, old in zip(server.children(), before, strict=True)]
        assert grown == [10, 10]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            streams = [await session.post(f"{server.url}/v1/completions", json=BODY) for _ in range(10)]
            assert [stream.status for stream in streams] == [200] * 10
            for _ in range(4):
                assert (await one_request(server))[0] == 429
                assert await metric(server, "vllm:num_requests_running") == 10
            idle += await clients_of(server, 10)
            await asyncio.sleep(0.2)
            status, body = await one_request(server, "/health")
            assert status == 429 and b"limits.connections" in body
            for writer in idle:
                writer.close()
            for stream in streams:
                stream.close()
        await asyncio.sleep(0.2)
        assert await metric(server, "vllm:num_requests_running") == 0
        async with aiohttp.ClientSession() as session:
            stream = await session.post(f"{server.url}/v1/completions", json=BODY)
            left = server.children()
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: "stopping: 1 requests" in server.log)
            server.process.send_signal(signal.SIGTERM)
            assert await server.ended(2) == 1
            await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in left))
            stream.close()
        assert "Traceback" not in server.log, server.log


async def test_the_console_of_any_process_shows_all(setup: Setup) -> None:
    worker = await setup.worker("m")
    worker.answer = streaming(*[EVENT] * 30, pause=0.05, forever=True)
    async with several(setup, worker) as server, aiohttp.ClientSession() as session:
        consoles = [await session.get(f"{server.url}/console/events") for _ in range(2)]
        streams = [await session.post(f"{server.url}/v1/completions", json=BODY) for _ in range(4)]
        for console in consoles:  # of two processes, which take turns
            async with asyncio.timeout(10):
                while True:
                    line = await console.content.readline()
                    shown = json.loads(line[6:]).get("total", {}) if line.startswith(b"data: ") else {}
                    if shown.get("running") == 4 and shown["generated"] > 40:
                        break
        for answer in consoles + streams:
            answer.close()


async def test_a_killed_process_loses_its_own_streams_only_and_is_replaced(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(*[EVENT] * 20, pause=0.1)
    async with several(setup, worker) as server, aiohttp.ClientSession() as session:
        streams = [await session.post(f"{server.url}/v1/completions", json=BODY) for _ in range(4)]
        victim, other = server.children()
        os.kill(victim, signal.SIGKILL)
        for _ in range(10):
            assert (await one_request(server, "/health"))[0] == 200
        broken = whole = 0
        for stream in streams:
            try:
                whole += await stream.read() == EVENT * 20
            except aiohttp.ClientPayloadError:
                broken += 1
        assert (broken, whole) == (2, 2)
        await until(lambda: len(server.children()) == 2 and victim not in server.children(), 10)
        assert other in server.children() and "was ended by SIGKILL; another takes its place" in server.log
        await until(lambda: server.log.count(" is ready: ") == 3, 10)
        assert await metric(server, "vllm:num_requests_running") == 0
        assert await metric(server, "syshax_api_requests_total") == 2, "those that finished"
        worker.answer = streaming(EVENT)
        assert [(await one_request(server))[0] for _ in range(6)] == [200] * 6
        assert await metric(server, "syshax_api_requests_total") == 8


async def test_a_process_that_hangs_is_killed_and_what_it_was_given_is_served(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(EVENT)
    environment = {"WATCHDOG_USEC": "1500000", "NOTIFY_SOCKET": str(setup.folder / "notify")}
    with notifications(setup.folder / "notify") as told:
        async with several(setup, worker, environment=environment) as server:
            await until(lambda: {"READY=1", "WATCHDOG=1", "STATUS=2 processes; ready: m"} <= set(told()))
            victim = server.children()[0]
            os.kill(victim, signal.SIGSTOP)
            answers = await asyncio.gather(*(one_request(server) for _ in range(8)))
            assert answers == [(200, EVENT)] * 8
            await until(lambda: len(server.children()) == 2 and victim not in server.children(), 10)
            assert "has not answered for" in server.log
            await until(lambda: any(line.startswith("STATUS=1 of 2 processes") for line in told()))
            server.process.terminate()
            assert await server.ended(8) == 0
            assert any(line == "STOPPING=1" for line in told())


async def test_a_process_without_descriptors_gives_way_and_one_that_is_told_to_end_finishes_first(setup: Setup) -> None:
    worker = await setup.worker()
    async with several(setup, worker) as server, aiohttp.ClientSession() as session:
        worker.answer = streaming(EVENT)
        poor = server.children()[0]
        allow_descriptors(poor, False)
        assert [await one_request(server) for _ in range(8)] == [(200, EVENT)] * 8
        for pid in server.children():
            allow_descriptors(pid, False)
        before = len(descriptors(server.process.pid))
        requests = [asyncio.create_task(one_request(server)) for _ in range(3)]
        await until(lambda: len(descriptors(server.process.pid)) > before)
        await asyncio.sleep(0.1)
        for pid in server.children():
            allow_descriptors(pid, True)
        assert await asyncio.gather(*requests) == [(200, EVENT)] * 3, "they waited"
        allow_descriptors(server.process.pid, False)
        request = asyncio.create_task(one_request(server))
        await until(lambda: "cannot accept connections: Too many open files" in server.log)
        allow_descriptors(server.process.pid, True)
        assert await request == (200, EVENT), "it waited"
        await asyncio.sleep(1.1)
        worker.answer = streaming(*[EVENT] * 10, pause=0.05)
        streams = [await session.post(f"{server.url}/v1/completions", json=BODY) for _ in range(2)]
        os.kill(poor, signal.SIGTERM)
        assert [await stream.read() for stream in streams] == [EVENT * 10] * 2
        await until(lambda: len(server.children()) == 2 and poor not in server.children(), 10)


async def test_without_a_supervisor_processes_finish_and_end(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(*[EVENT] * 10, pause=0.05)
    async with several(setup, worker) as server, aiohttp.ClientSession() as session:
        streams = [await session.post(f"{server.url}/v1/completions", json=BODY) for _ in range(2)]
        left = server.children()
        server.process.kill()
        assert [await stream.read() for stream in streams] == [EVENT * 10] * 2
        await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in left), 5)


@pytest.mark.parametrize(("processes", "lives"), [(1, 3), (2, 2)])
async def test_no_request_fails_over_restarts_under_load(setup: Setup, processes: int, lives: int) -> None:
    """A socket handed over by systemd; clients that keep their connection and that do not, streams and others."""
    worker = await setup.worker()
    done = 0
    ended = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def client(number: int) -> None:
        nonlocal done
        connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not ended.is_set():
                body = {"model": "m", "stream": number % 4 < 2}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200 and await response.read() == expected
                done += 1

    expected = EVENT * 4
    worker.answer = streaming(*[EVENT] * 4, pause=0.02)
    clients: list[asyncio.Task[None]] = []
    for life in range(lives):
        async with several(setup, worker, processes=processes, listener=listener) as server:
            clients = clients or [asyncio.create_task(client(number)) for number in range(12)]
            before = done
            await asyncio.sleep(0.5)
            assert done > before
            if life == lives - 1:
                ended.set()
                await asyncio.gather(*clients)
            server.process.send_signal(signal.SIGTERM)
            assert await server.ended(10) == 0
            assert "Traceback" not in server.log, server.log
    listener.close()
    assert done >= 100


async def test_a_reload_reaches_all_processes_and_a_broken_file_none(setup: Setup) -> None:
    """Also one that starts when the file is broken: it gets the keys that the others have."""
    worker = await setup.worker()
    keys = setup.folder / "keys.toml"
    write_keys(keys, {"sk-one": {}})
    async with several(setup, worker, keys=keys) as server:

        async def statuses(key: str) -> set[int]:
            return {(await one_request(server, "/v1/models", key))[0] for _ in range(4)}

        assert (await statuses("sk-one"), await statuses("sk-two")) == ({200}, {401})
        write_keys(keys, {"sk-two": {}})
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: "SIGHUP: 1 API keys" in server.log)
        assert (await statuses("sk-one"), await statuses("sk-two")) == ({401}, {200})
        keys.write_text("broken")
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: "the old keys stay" in server.log)
        os.kill(server.children()[0], signal.SIGKILL)
        await until(lambda: server.log.count(" is ready: ") == 3, 15)
        assert (await statuses("sk-one"), await statuses("sk-two")) == ({401}, {200})
