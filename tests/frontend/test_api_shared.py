"""Real processes: keys, their rates and the places of a worker are those of all of them together."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from api_program import Api, api
from front_fixtures import Setup, bearer, echo, silent, until, write_keys

from syshaxd.frontend.config import load_config


async def status(server: Api, key: str, path: str = "/v1/completions") -> int:
    """Of one request on a connection of its own, so that any process may get it."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{server.url}{path}", json={"model": "m"}, headers=bearer(key)) as response,
    ):
        await response.read()
        return response.status


async def test_rates_hold_over_processes_and_the_credential_is_the_file(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker()
    keys = write_keys(tmp_path / "syshax-api.keys", {"slow": {"requests_per_minute": 7}, "free": {}})
    config = tmp_path / "api.toml"
    config.write_text(f'port = 0\nprocesses = 2\nworkers = ["{worker.url}"]\n[daemon]\nview_socket = ""\n')
    async with api("--config", str(config), environment={"CREDENTIALS_DIRECTORY": str(tmp_path)}) as server:
        await server.ready()
        assert len(server.children()) == 2
        statuses = await asyncio.gather(*(status(server, "slow") for _ in range(20)))
        assert sorted(statuses) == [200] * 7 + [429] * 13
        assert [await status(server, key) for key in ("free", "wrong")] == [200, 401]
        write_keys(keys, {"slow": {"requests_per_minute": 9}, "new": {}})
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: "2 API keys" in server.log)
        statuses = await asyncio.gather(*(status(server, "slow") for _ in range(10)))
        assert sorted(statuses) == [200] * 2 + [429] * 8
        assert [await status(server, key) for key in ("new", "new", "free", "free")] == [200, 200, 401, 401]
        os.kill(server.children()[0], signal.SIGKILL)
        await until(lambda: server.log.count(" is ready: ") == 3, 15)
        assert [await status(server, "slow") for _ in range(4)] == [429] * 4, "the new process knows the last minute"


async def test_a_workers_places_are_shared_and_everybody_gets_one(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker()
    now, most = 0, 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response({})

    worker.answer = slow
    config = tmp_path / "api.toml"
    config.write_text(
        f'port = 0\nprocesses = 2\nworkers = ["{worker.url}"]\n[daemon]\nview_socket = ""\n'
        "[queue]\nrequests_per_worker = 3\n"
    )
    async with api("--config", str(config)) as server:
        await server.ready()
        statuses = await asyncio.gather(*(status(server, "") for _ in range(60)))
        assert statuses == [200] * 60 and most == 3


async def test_those_who_wait_elsewhere_are_served_when_a_process_dies_with_all_places(
    setup: Setup, tmp_path: Path
) -> None:
    worker = await setup.worker()
    ports: list[int] = []

    async def silently(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return await silent(request)

    worker.answer = silently
    config = tmp_path / "api.toml"
    config.write_text(
        f'port = 0\nprocesses = 2\nworkers = ["{worker.url}"]\n[daemon]\nview_socket = ""\n'
        "[queue]\nrequests_per_worker = 1\n"
    )
    async with api("--config", str(config)) as server:
        await server.ready()
        requests = [asyncio.create_task(status(server, ""))]
        await until(lambda: len(ports) == 1)
        requests += [asyncio.create_task(status(server, "")) for _ in range(9)]
        await asyncio.sleep(0.5)
        worker.answer = echo
        os.kill(holder(server, ports[0]), signal.SIGKILL)
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(ends[0], aiohttp.ClientError), "it was the dead process's"
        served = [end for end in ends if end == 200]
        assert 3 <= len(served) < 10 and all(isinstance(end, aiohttp.ClientError) for end in ends if end != 200)


def holder(server: Api, port: int) -> int:
    """The process whose socket has this local port."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if int(row[1].partition(":")[2], 16) == port}
    for pid in server.children():
        if any(str(entry.readlink()) in sockets for entry in Path(f"/proc/{pid}/fd").iterdir()):
            return pid
    raise AssertionError(f"no process has port {port}")


def test_the_credential_is_used_where_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "api.toml"
    config.write_text('workers = ["http://h:1"]\n')
    assert load_config(config, {}).keys_file == ""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert load_config(config, {}).keys_file == ""
    write_keys(tmp_path / "syshax-api.keys", {"k": {}})
    assert load_config(config, {}).keys_file == str(tmp_path / "syshax-api.keys")
    assert load_config(config, {"keys_file": "/other"}).keys_file == "/other"
