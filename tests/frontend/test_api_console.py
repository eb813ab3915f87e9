"""/console without a browser: what needs a key, what the events say, that nothing is computed while nobody watches."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_daemon import FakeDaemon, session
from front_fixtures import Front, Setup, error_of, streaming, until, write_keys
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.frontend import console, console_daemon, daemon_view
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.console_data import quantile, take
from syshaxd.frontend.metrics import Metrics
from syshaxd.frontend.server import Server

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
PAGES = ["/console", "/console/console.css", "/console/console.js", "/console/charts.js", "/console/icon.svg"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SAMPLE_SECONDS", 0.1)
    monkeypatch.setattr(console_daemon, "LOOK_SECONDS", 0.25)
    monkeypatch.setattr(daemon_view, "POLL_SECONDS", 0.05)


class Watching:
    """An open /console/events."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._rest = b""

    async def next(self, wanted: str) -> dict[str, Any]:
        async with asyncio.timeout(5):
            while True:
                while b"\n\n" not in self._rest:
                    chunk = await self.response.content.readany()
                    assert chunk, "the stream ended"
                    self._rest += chunk
                event, _, self._rest = self._rest.partition(b"\n\n")
                kind, data = event.split(b"\n")
                if kind == b"event: " + wanted.encode():
                    return dict(json.loads(data.removeprefix(b"data: ")))

    async def until(self, wanted: str, condition: Any) -> dict[str, Any]:
        for _ in range(100):
            if condition(found := await self.next(wanted)):
                return found
        raise AssertionError(f"never: {found}")


@asynccontextmanager
async def watching(front: Front, key: str = "") -> AsyncIterator[Watching]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with front.session.get("/console/events", headers=headers) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        yield Watching(response)


@pytest.fixture
def daemon(tmp_path: Path) -> FakeDaemon:
    return FakeDaemon(tmp_path / "view.sock")


async def test_the_page_says_nothing_and_the_events_ask_for_a_key(setup: Setup, tmp_path: Path) -> None:
    key, key_file = "sk-one", write_keys(tmp_path / "keys.toml", {"sk-one": {}})
    worker = await setup.worker("secret-model")
    front = await setup.front(worker, keys=key_file)
    for path in PAGES:
        closed = path == "/console"  # answered with the page all the same, which asks for the key
        async with front.session.get(path) as response:
            text = await response.text()
            assert response.status == (401 if closed else 200) and "secret-model" not in text
            assert ("WWW-Authenticate" in response.headers) == closed
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text, "no other server"
        assert (await front.session.post(path)).status == 405
        assert (await front.session.head(path)).status == (401 if closed else 200)
        assert (await front.session.get(path, headers={"Authorization": f"Bearer {key}"})).status == 200
    for path in ("/console/", "/console/x", "/console/../metrics", "/console/console.html"):
        assert (await front.session.get(path)).status == 401
    for name in ("", "wrong"):
        headers = {"Authorization": f"Bearer {name}"} if name else {}
        await error_of(await front.session.get("/console/events", headers=headers), 401, "invalid_api_key")
    async with watching(front, key) as events:
        assert (await events.next("sample"))["models"][0]["name"] == "secret-model"


async def test_nothing_inline_that_the_policy_would_refuse(setup: Setup) -> None:
    front = await setup.front(await setup.worker())
    page = await (await front.session.get("/console")).text()
    script = await (await front.session.get("/console/console.js")).text()
    assert "<style" not in page and " style=" not in page and " on" not in page.split("<body>")[0]
    assert not any(word in script for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "document.write"))


async def test_figures_are_those_of_the_metrics(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, daemon={"view_socket": ""})
    worker.answer = streaming(*[EVENT] * 9, b"data: [DONE]\n\n", pause=0.02)
    async with watching(front) as events:
        assert (await events.next("hello"))["points"] == []
        first = await events.next("sample")
        assert (first["total"]["generated"], first["total"]["first"], first["ready"]) == (0, [None, None], True)
        assert first["daemon"] == {"state": "not asked"}
        request = asyncio.create_task(front.chat(stream=True))
        running = await events.until("sample", lambda sample: sample["total"]["running"] == 1)
        assert running["workers"][0]["running"] == 1 == running["models"][0]["running"]
        await (await request).read()
        done = await events.until(
            "sample", lambda sample: sample["total"]["running"] == 0 and sample["total"]["gap"][0]
        )
        model = done["models"][0]
        assert (model["name"], model["workers"]) == ("m", [1, 1])
        assert 0.005 <= model["gap"][0] <= 0.1 and model["gap"][0] <= model["gap"][1]
        assert model["first"][0] > 0 and done["total"]["failed"] == 0
        later = await events.until("sample", lambda sample: sample["total"]["generated"] > 0)
        assert later["point"]["models"]["m"][0] == later["models"][0]["generated"] == later["workers"][0]["generated"]
    async with watching(front) as events:
        assert len((await events.next("hello"))["points"]) >= 3, "who comes later sees what others were shown"


async def test_states_of_workers_and_the_daemon(setup: Setup, daemon: FakeDaemon) -> None:
    await daemon.start()
    good, lost = await setup.worker("m"), await setup.worker("n")
    daemon.sessions = [session(good.url)]
    front = await setup.front(good, lost, daemon={"view_socket": str(daemon.path)})
    async with watching(front) as events:
        sample = await events.until("sample", lambda sample: sample["daemon"].get("nodes"))
        assert [worker["experts"] for worker in sample["workers"]] == ["attached", "not known"]
        assert sample["daemon"]["nodes"][0]["busy"] == 0.25 and sample["daemon"]["sessions"][0]["address"] == good.url
        await lost.stop()
        sample = await events.until("sample", lambda sample: not sample["workers"][1]["ready"])
        assert sample["ready"] and "refused" in sample["workers"][1]["reason"]
        await daemon.stop()
        sample = await events.until("sample", lambda sample: sample["daemon"]["state"] == "not seen")
        assert sample["daemon"]["reason"] == "no such file or directory"


async def test_heat_maps_are_of_what_came_lately(setup: Setup, daemon: FakeDaemon) -> None:
    await daemon.start()
    daemon.tokens = [[10, 10, 10, 10] for _ in range(3)]
    worker = await setup.worker()
    front = await setup.front(worker, daemon={"view_socket": str(daemon.path)})
    async with watching(front) as events:
        heat = (await events.next("experts"))["models"][0]
        assert (heat["model"], heat["layers"], heat["experts"], heat["seconds"]) == ("m", 3, 4, 0)
        assert heat["percent"] == [100] * 12 and heat["layer_ids"] == [1, 3, 5]
        daemon.tokens = [[14, 10, 10, 10], [11, 11, 11, 11], [10, 10, 12, 12]]
        heat = (await events.until("experts", lambda experts: experts["models"][0]["tokens"] == 12))["models"][0]
        assert heat["percent"] == [400, 0, 0, 0, 100, 100, 100, 100, 0, 0, 200, 200]


async def test_nothing_is_computed_while_nobody_watches(setup: Setup, daemon: FakeDaemon) -> None:
    await daemon.start()
    front = await setup.front(await setup.worker(), daemon={"view_socket": str(daemon.path)})
    watched = front.app.console
    assert watched._task is None
    async with watching(front) as one, watching(front) as two:
        await one.next("sample")
        await two.next("sample")
        assert len(watched._watchers) == 2
        asked = daemon.asked.count("/v1/status")
        await until(lambda: daemon.asked.count("/v1/status") > asked)
    await until(lambda: watched._task is None)
    asked = daemon.asked.count("/v1/status")
    await asyncio.sleep(0.6)
    assert daemon.asked.count("/v1/status") == asked and not watched._watchers


async def test_watchers_are_limited_and_slow_ones_hold_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "WATCHERS", 1)
    monkeypatch.setattr(console, "SAMPLE_SECONDS", 0.001)
    front = await setup.front(await setup.worker())
    async with watching(front):
        await error_of(await front.session.get("/console/events"), 429, "overloaded")
        await asyncio.sleep(0.5)  # it reads nothing
        (watcher,) = front.app.console._watchers
        assert set(watcher.pending) <= {"hello", "sample", "experts"}
    await until(lambda: not front.app.console._watchers)
    assert (await front.session.head("/console/events")).status == 200


async def test_it_ends_when_the_front_end_drains(setup: Setup) -> None:
    front = await setup.front(await setup.worker())
    async with watching(front) as events:
        await events.next("sample")
        front.app.console.close()
        async with asyncio.timeout(2):
            await events.response.content.read()


async def test_hostile_names_are_data(setup: Setup) -> None:
    name = "</script><img src=x onerror=alert(1)>\n\nevent: sample\ndata: {}\u2028"
    front = await setup.front(await setup.worker(name))
    async with watching(front) as events:
        sample = await events.next("sample")
        assert [model["name"] for model in sample["models"]] == [name] == sample["workers"][0]["models"]


def test_sums_over_processes() -> None:
    first = Board.share(2)
    one, two = Metrics(first), Metrics(Board(2, 1, first.descriptor))
    one.series("m", "w").generation_tokens.inc(3)
    two.series("m", "w").generation_tokens.inc(4)
    two.series("n", "v").first_token.observe(0.3)
    two.request("m", "w", 502).inc()
    for metrics in (one, two):
        snapshot = take(metrics)
        assert snapshot.models["m"].generated == 7 == snapshot.total.generated == snapshot.workers["w"]
        assert sum(snapshot.models["n"].first[:-1]) == 1 and snapshot.models["m"].failed == 1


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50), st.floats(0.01, 1))
def test_percentiles_lie_in_the_bucket_of_the_true_one(values: list[float], part: float) -> None:
    bounds = (0.5, 1.0, 5.0, 10.0)
    edges = (-1.0, *bounds, float("inf"))
    counts = [sum(low < value <= high for value in values) for low, high in pairwise(edges)]
    found = quantile(part, bounds, [float(count) for count in counts])
    ranked = sorted(values)
    true = next(value for place, value in enumerate(ranked, 1) if place >= part * len(values) - 1e-9)
    bucket = sum(true > bound for bound in bounds)
    assert found is not None
    if bucket == len(bounds):
        assert found == bounds[-1]
    else:
        assert max(0.0, edges[bucket]) - 1e-9 <= found <= bounds[bucket] + 1e-9


def test_no_observation_has_no_percentile() -> None:
    assert quantile(0.5, (1.0,), [0.0, 0.0]) is None


async def test_a_watcher_that_stopped_reading_does_not_hold_up_the_end() -> None:
    """Nor does one that reads; both have connections of their own."""
    config = ApiConfig.model_validate({"workers": [], "timeouts": {"drain_seconds": 30}})
    server = Server(config, None, Board())
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    site = web.SockSite(server.runner, listener)
    await site.start()
    reading = await asyncio.open_connection(*listener.getsockname())
    silent = await asyncio.open_connection(*listener.getsockname(), limit=1 << 10)
    for _, writer in (reading, silent):
        writer.write(b"GET /console/events HTTP/1.1\r\nHost: h\r\n\r\n")
    await asyncio.gather(*(reader.readuntil(b"event: sample") for reader, _ in (reading, silent)))
    rest = asyncio.create_task(reading[0].read())
    server.app.console._publish("sample", "x" * (16 << 20))
    transports = [handler.transport for handler in server.runner.server.connections]  # type: ignore[union-attr]
    await until(lambda: sorted(transport.get_write_buffer_size() > 0 for transport in transports) == [False, True])
    async with asyncio.timeout(5):
        await server.drain()
        assert (await rest).endswith(b"\r\n0\r\n\r\n")
    for _, writer in (reading, silent):
        writer.close()
    await server.close()
