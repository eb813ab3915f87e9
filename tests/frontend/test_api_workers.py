"""Live workers: `syshaxctl workers` against one process and two, with streams running; who may use the socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from api_program import Api, api
from front_fixtures import Setup, running_front, streaming, until

from syshax.errors import InvalidArgumentError, NotFoundError
from syshaxd.frontend import control
from syshaxd.frontend.board import Board
from syshaxd.frontend.commands import Commands
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.control import Control
from syshaxd.frontend.fleet import Fleet
from syshaxd.peers import Peer

EVENT = b"data: 1\n\n"


class Ctl:
    """syshaxctl workers, of the front-end with that socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def __call__(self, *words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "syshax.ctl", "workers", *words]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "SYSHAX_API_SOCKET": str(self.path), "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        return process.returncode or 0, out.decode()

    async def states(self) -> dict[str, str]:
        async with self._session() as session, session.get("/v1/workers") as response:
            return {worker["url"]: worker["state"] for worker in (await response.json())["workers"]}

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(self.path)))

    async def change(self, method: str, url: str, **body: Any) -> dict[str, str]:
        """The answer; `url` is in the path unless it is added."""
        path = "/v1/workers" if method == "POST" else f"/v1/workers/{quote(url, safe='')}"
        given = {"url": url} if method == "POST" else body or None
        async with self._session() as session, session.request(method, path, json=given) as response:
            assert response.status == 200, await response.text()
            return dict(await response.json())


@asynccontextmanager
async def front(
    setup: Setup, processes: int, *workers: str, drain_seconds: float = 8
) -> AsyncIterator[tuple[Api, Ctl]]:
    config, path = setup.folder / "api.toml", setup.folder / "c.sock"
    config.write_text(
        f'port = 0\nprocesses = {processes}\nworkers = {json.dumps(workers)}\n[daemon]\nview_socket = ""\n'
        f'[control]\nsocket = "{path}"\n[health]\nretry_seconds = 0.1\n[timeouts]\ndrain_seconds = {drain_seconds}\n'
    )
    async with api("--config", str(config)) as server:
        await server.ready()
        yield server, Ctl(path)


async def ask(url: str, number: int) -> None:
    """So many requests, each on a connection of its own."""
    for _ in range(number):
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"{url}/v1/completions", json={"model": "m"}) as response,
        ):
            assert response.status == 200
            await response.read()


@pytest.mark.parametrize("processes", [1, 2])
async def test_add_drain_undrain_and_remove_with_running_streams(setup: Setup, processes: int) -> None:
    first, second = await setup.worker(), await setup.worker()
    for worker in (first, second):
        worker.answer = streaming(*[EVENT] * 30, pause=0.05)
    async with front(setup, processes, first.url) as (server, ctl), aiohttp.ClientSession() as session:
        streams = [await session.post(f"{server.url}/v1/completions", json={"model": "m"}) for _ in range(3)]
        added = await ctl.change("POST", second.url)
        assert added["permanent"] == f'workers = ["{first.url}", "{second.url}"]'
        await wait_for(ctl, {first.url: "ready", second.url: "ready"})
        await ctl.change("PATCH", first.url, draining=True)
        assert await ctl.states() == {first.url: "draining", second.url: "ready"}
        second.answer = streaming(EVENT)
        before = len(first.seen)
        await ask(server.url, 6)
        assert len(first.seen) == before and len(second.seen) == 6
        assert [await stream.read() for stream in streams] == [EVENT * 30] * 3
        if processes == 2:  # one that starts later knows of the changes
            os.kill(server.children()[0], signal.SIGKILL)
            await until(lambda: server.log.count(f"worker {second.url} is ready") == 3, 15)
            assert await ctl.states() == {first.url: "draining", second.url: "ready"}
        await ctl.change("PATCH", first.url, draining=False)
        assert await ctl.states() == {first.url: "ready", second.url: "ready"}
        second.answer = streaming(*[EVENT] * 20, pause=0.05)
        running = [await session.post(f"{server.url}/v1/completions", json={"model": "m"}) for _ in range(6)]
        assert len(second.seen) > 6
        assert "within 8 s, then it is gone" in (await ctl.change("DELETE", second.url))["message"]
        assert (await ctl.states())[second.url] == "leaving"
        assert {len(await stream.read()) for stream in running} == {20 * len(EVENT), 30 * len(EVENT)}
        await wait_for(ctl, {first.url: "ready"})
        status, out = await ctl()
        assert status == 0 and first.url in out and second.url not in out and "TTFT" in out
        assert server.log.count(f"worker {second.url} is gone") == processes
        assert "Traceback" not in server.log


async def test_a_removed_worker_ends_its_streams_at_the_limit(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(EVENT, forever=True)
    async with front(setup, 1, worker.url, drain_seconds=0.5) as (server, ctl), aiohttp.ClientSession() as session:
        stream = await session.post(f"{server.url}/v1/completions", json={"model": "m"})
        await ctl.change("DELETE", worker.url)
        assert b"The worker was removed" in await stream.read()
        await wait_for(ctl, {})
        response = await session.get(f"{server.url}/ready")
        assert response.status == 503 and "there is no worker" in (await response.json())["reason"]
        status, out = await ctl("drain", worker.url)
        assert status == 5 and f"there is no worker {worker.url}" in out


async def test_a_worker_moved_to_another_group_as_it_finishes_requests_is_there_in_every_process(setup: Setup) -> None:
    """Two processes, one with a stream on it: the old place goes on leaving, the new one counts at once in both."""
    worker = await setup.worker()
    worker.answer = streaming(EVENT, forever=True)
    url, groups = worker.url, {"a": {"workers": [worker.url]}, "b": {}}
    board = Board.share(3)
    rows = [Board(3, row, board.descriptor) for row in (1, 2)]
    fronts = [await setup.stack.enter_async_context(running_front(board=row, groups=groups)) for row in rows]
    commands = [Commands(SimpleNamespace(app=front.app), 30.0) for front in fronts]  # type: ignore[arg-type]
    ready = board.cell(json.dumps(["syshax_api_worker_ready", url]))

    async def ask_all(name: str, **fields: Any) -> list[Any]:
        return [await process.do(name, **fields) for process in commands]

    def places() -> list[dict[str, bool]]:
        """Of each process: the groups that have it, and whether it takes requests there."""
        return [{found.group: found.takes_requests for found in front.app.workers.all} for front in fronts]

    fleet = Fleet(ApiConfig.model_validate({"groups": groups}), ask_all)
    await until(lambda: places() == [{"a": True}] * 2)
    stream = await fronts[0].chat(stream=True)
    await fleet.remove(url)
    await until(lambda: places() == [{"a": False}, {}])
    assert (await fleet.add(url, "b")).group == "b"
    await until(lambda: places() == [{"a": False, "b": True}, {"b": True}])
    _, shown = await fleet.look()
    assert [(info.group, info.state, info.configured, info.outstanding) for info in shown] == [
        ("b", "ready", False, 1),
        ("a", "leaving", True, 1),
    ]
    await fleet.remove(url)
    await fleet.add(url, "a")
    await until(lambda: places() == [{"a": True}] * 2 and ready.parts() == [0, 2, 2])
    await fleet.remove(url)
    await fleet.add(url, "b")
    await until(lambda: places() == [{"a": False, "b": True}, {"b": True}] and ready.parts() == [0, 2, 2])
    stream.close()
    await until(lambda: places() == [{"b": True}] * 2)
    assert ready.parts() == [0, 2, 2], "the old one has not taken the new one's opinion with it"
    worker.answer = streaming(EVENT)
    assert await (await fronts[0].chat()).read() == EVENT


async def wait_for(ctl: Ctl, states: dict[str, str]) -> None:
    async with asyncio.timeout(15):
        while await ctl.states() != states:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)


async def test_without_a_front_end_the_error_says_so(setup: Setup) -> None:
    status, out = await Ctl(setup.folder / "none.sock")()
    assert status == 3 and "no syshax-api at" in out and "systemctl start syshax-api" in out


CONFIG = ApiConfig.model_validate(
    {"workers": ["http://h:1"], "groups": {"fast": {"workers": ["http://h:2"]}, "slow": {}}}
)


async def test_faults_of_changes(setup: Setup) -> None:
    told: list[Any] = []

    async def ask_all(name: str, **fields: Any) -> list[Any]:
        told.append((name, fields))
        return []

    fleet = Fleet(CONFIG, ask_all)
    for url, group, error, text in (
        ("h:1", None, InvalidArgumentError, "a worker is http://HOST:PORT or unix:PATH"),
        ("http://h:1/", None, InvalidArgumentError, "is there already, in group default"),
        ("http://h:3", "none", InvalidArgumentError, "the configuration has: default, fast, slow"),
    ):
        with pytest.raises(error, match=text):
            await fleet.add(url, group)
    with pytest.raises(NotFoundError, match="there is no worker http://h:9"):
        await fleet.drain("http://h:9", True)
    assert not told
    await fleet.add("http://h:3/", "fast")
    assert fleet.permanent("fast") == '[groups.fast] workers = ["http://h:2", "http://h:3"]'
    assert [row["url"] for row in told[0][1]["wanted"]] == ["http://h:1", "http://h:2", "http://h:3"]
    several = Fleet(ApiConfig.model_validate({"groups": {"a": {"workers": ["http://h:1"]}, "b": {}}}), ask_all)
    with pytest.raises(InvalidArgumentError, match="there are several groups: a, b"):
        await several.add("http://h:2", None)


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        (Peer(1, 0, 0, frozenset()), True),
        (Peer(1, os.geteuid(), 5, frozenset()), True),
        (Peer(1, 4711, 5, frozenset([5, 97])), True),
        (Peer(1, 4711, 5, frozenset([5])), False),
    ],
)
async def test_who_may_use_the_socket(setup: Setup, monkeypatch: pytest.MonkeyPatch, peer: Peer, allowed: bool) -> None:
    async def ask_all(name: str, **fields: Any) -> list[Any]:
        return [[]]

    path = setup.folder / "c.sock"
    config = ApiConfig.model_validate({"workers": ["http://h:1"], "control": {"socket": str(path)}})
    monkeypatch.setattr("grp.getgrnam", lambda name: SimpleNamespace(gr_gid={"syshax-admin": 97}[name]))
    monkeypatch.setattr(control, "peer_of", lambda _: peer)
    served = Control(config, Fleet(config, ask_all))
    await served.start()
    routes = [
        ("GET", "", None),
        ("POST", "", {"url": "http://h:2"}),
        ("PATCH", "/x", {"draining": True}),
        ("DELETE", "/x", None),
    ]
    try:
        async with aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(path))) as session:
            for method, end, body in routes:
                async with session.request(method, f"/v1/workers{end}", json=body) as response:
                    text = await response.text()
                    if allowed:
                        assert response.status == (404 if end else 200), text
                    else:
                        assert response.status == 403 and "syshax-admin" in text
    finally:
        await served.close()
    assert not path.exists()


async def test_hostile_clients_of_the_socket_do_not_keep_others_out(setup: Setup) -> None:
    """Half a request, a body that never comes or is too large, bytes that are no HTTP, connections that say nothing."""
    worker = await setup.worker()
    async with front(setup, 1, worker.url) as (server, ctl):
        held = []
        for data in (
            b"GET /v1/wor",
            b"POST /v1/workers HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n",
            b"\x00\xff\r\n\r\n",
            *[b""] * 40,
        ):
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].connect(str(ctl.path))
            held[-1].sendall(data)
        async with aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(ctl.path))) as session:
            for body in (b"x" * (17 << 10), b"[]", b'{"url": 5}', b'{"url": "http://h:1", "x": 1}'):
                async with session.post("/v1/workers", data=body) as response:
                    assert response.status in (400, 413), await response.text()
                    assert "error" in await response.json()
        assert await ctl.states() == {worker.url: "ready"}
        for connection in held:
            connection.close()
        assert "Traceback" not in server.log
