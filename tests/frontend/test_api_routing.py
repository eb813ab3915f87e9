"""Which worker answers: aliases, groups by priority, vLLM's priority, least load, affinity that is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from front_fixtures import FakeWorker, Setup, error_of, silent, until, write_keys
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.frontend.app import App
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.routing import Ask, Router, mixed, warmest
from syshaxd.frontend.workers import Worker

RAW = b'{ "temperature":1e-07,"model" : "gpt-4o", "x":"\\u00e9\xc3\xa9",  "x":123456789012345678901234567890 }'


def bodies(worker: FakeWorker) -> list[Any]:
    return [json.loads(seen.body) for seen in worker.seen]


async def test_an_alias_changes_the_model_and_no_other_byte(setup: Setup) -> None:
    worker = await setup.worker("qwen3", "other")
    front = await setup.front(worker, aliases={"gpt-4o": "qwen3", "whisper-1": "other"})
    response = await front.session.post("/v1/chat/completions", data=RAW)
    assert await response.read() == RAW.replace(b"gpt-4o", b"qwen3")
    form = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    raw = form % (b"file", b"\x00\xff model") + form % (b"model", b"whisper-1") + b"--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    response = await front.session.post("/v1/audio/transcriptions", data=raw, headers=headers)
    assert await response.read() == raw.replace(b"whisper-1", b"other")
    for seen in worker.seen:
        assert dict(seen.headers)["Content-Length"] == str(len(seen.body))
    listed = await (await front.session.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["qwen3", "other", "gpt-4o", "whisper-1"]
    assert (await (await front.session.get("/v1/models/gpt-4o")).json())["id"] == "gpt-4o"
    error = await error_of(await front.chat("gpt-5"), 404, "model_not_found")
    assert "`gpt-4o`" in error["message"]


async def test_an_alias_of_a_model_that_is_away_is_not_ready_and_not_listed(setup: Setup) -> None:
    one, two = await setup.worker("a"), await setup.worker("b")
    front = await setup.front(one, two, aliases={"x": "b"})
    await two.stop()
    await until(lambda: sum(worker.ready for worker in front.app.workers.all) == 1)
    await error_of(await front.chat("x"), 503, "not_ready")
    listed = await (await front.session.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["a"]


async def test_an_answer_names_its_worker_but_not_its_address(setup: Setup) -> None:
    workers = [await setup.worker() for _ in range(2)]
    front = await setup.front(workers[0], groups={"chat": {"workers": [workers[1].url]}}, affinity={"enabled": False})
    await front.until_ready(2)
    ready = await (await front.session.get("/ready")).json()
    names = {row["name"]: row["worker"] for row in ready["workers"]}
    assert len(names) == 2 and {name.partition("-")[0] for name in names} == {"default", "chat"}
    for _ in range(4):
        response = await front.chat()
        before = [len(worker.seen) for worker in workers]
        name = response.headers["x-syshax-worker"]
        assert names[name] in {worker.url for worker in workers} and "." not in name
        response = await front.chat()
        served = next(w for w, n in zip(workers, before, strict=True) if len(w.seen) > n)
        assert names[response.headers["x-syshax-worker"]] == served.url


@pytest.mark.parametrize(
    ("group_priorities", "expected"),
    [
        (["interactive", "normal", "batch"], [0, 1, 2]),
        (["interactive", "batch"], [0, 1, 1]),
        (["batch", "interactive"], [1, 0, 0]),
        (["normal", "interactive"], [1, 0, 0]),
        (["batch"], [0, 0, 0]),
    ],
)
async def test_a_keys_priority_picks_the_nearest_group(
    setup: Setup, tmp_path: Path, group_priorities: list[str], expected: list[int]
) -> None:
    workers = [await setup.worker() for _ in group_priorities]
    groups = {
        f"g{at}": {"workers": [worker.url], "priority": priority}
        for at, (worker, priority) in enumerate(zip(workers, group_priorities, strict=True))
    }
    keys = write_keys(tmp_path / "keys", {name: {"priority": name} for name in ("interactive", "normal", "batch")})
    front = await setup.front(keys=keys, groups=groups)
    await front.until_ready(len(workers))
    for priority, group in zip(("interactive", "normal", "batch"), expected, strict=True):
        before = [len(worker.seen) for worker in workers]
        assert (await front.chat(key=priority)).status == 200
        assert [len(worker.seen) - n for worker, n in zip(workers, before, strict=True)] == [
            int(at == group) for at in range(len(workers))
        ]


async def test_a_group_that_is_not_ready_is_replaced_by_the_nearest_one(setup: Setup, tmp_path: Path) -> None:
    chat, nightly = await setup.worker(), await setup.worker()
    keys = write_keys(tmp_path / "keys", {"k": {"priority": "interactive"}})
    groups = {
        "chat": {"workers": [chat.url], "priority": "interactive"},
        "nightly": {"workers": [nightly.url], "priority": "batch"},
    }
    front = await setup.front(keys=keys, groups=groups)
    await front.until_ready(2)
    await chat.stop()
    for _ in range(3):  # the first one finds the worker gone, and is sent to the other group
        assert (await front.chat(key="k")).status == 200
    assert len(nightly.seen) == 3


async def test_vllms_priority_is_set_by_the_key_where_the_group_says_so(setup: Setup, tmp_path: Path) -> None:
    plain, scheduled = await setup.worker("a"), await setup.worker("b")
    names = ("interactive", "normal", "batch")
    keys = write_keys(tmp_path / "keys", {name: {"priority": name} for name in names})
    groups = {"plain": {"workers": [plain.url]}, "scheduled": {"workers": [scheduled.url], "vllm_priority": True}}
    front = await setup.front(keys=keys, groups=groups)
    await front.until_ready(2)
    for name in names:
        assert (await front.chat("a", key=name, priority=-5)).status == 200
        assert (await front.chat("b", key=name)).status == 200
        assert (await front.chat("b", key=name, priority=-5)).status == 200
    assert [body["priority"] for body in bodies(plain)] == [-5, -5, -5]
    assert [body["priority"] for body in bodies(scheduled)] == [0, 0, 10, 10, 20, 20]
    headers = {"Content-Encoding": "gzip", "Authorization": "Bearer batch"}
    await plain.stop()
    await until(lambda: sum(worker.ready for worker in front.app.workers.all) == 1)
    response = await front.session.post("/v1/chat/completions", data=b"\x1f\x8b", headers=headers)
    await error_of(response, 400, "bad_request")


async def test_without_keys_the_clients_priority_passes(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(groups={"g": {"workers": [worker.url], "vllm_priority": True}})
    await front.until_ready(1)
    await front.chat(priority=7)
    await front.chat()
    assert [body.get("priority") for body in bodies(worker)] == [7, None]


async def test_a_conversation_stays_on_one_worker(setup: Setup) -> None:
    workers = [await setup.worker() for _ in range(4)]
    front = await setup.front(*workers)
    for number in range(16):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {number}"}]
        for _ in range(3):
            assert (await front.chat(messages=messages)).status == 200
            messages += [{"role": "assistant", "content": "…"}, {"role": "user", "content": "and then?"}]
    homes = {}
    for at, worker in enumerate(workers):
        for body in bodies(worker):
            homes.setdefault(body["messages"][1]["content"], set()).add(at)
    assert len(homes) == 16 and all(len(home) == 1 for home in homes.values())
    assert len({min(home) for home in homes.values()}) > 1


async def test_without_affinity_equals_take_turns(setup: Setup) -> None:
    workers = [await setup.worker() for _ in range(3)]
    front = await setup.front(*workers, affinity={"enabled": False})
    for _ in range(6):
        await front.chat(messages=[{"role": "user", "content": "the same"}])
    assert [len(worker.seen) for worker in workers] == [2, 2, 2]


async def test_no_worker_is_overloaded_for_the_sake_of_its_cache(setup: Setup) -> None:
    workers = [await setup.worker() for _ in range(3)]
    front = await setup.front(*workers)
    for worker in workers:
        worker.answer = silent
    messages = [{"role": "user", "content": "the same"}]
    requests = [asyncio.create_task(front.chat(messages=messages)) for _ in range(30)]
    await until(lambda: sum(len(worker.seen) for worker in workers) == 30)
    assert max(len(worker.seen) for worker in workers) <= 1.5 * 10 + 1
    for request in requests:
        request.cancel()


async def simulated(enabled: bool) -> tuple[float, float]:
    """Of 100 conversations of 5 turns at 4 workers, 32 requests at a time: share of turns that find the worker of the
    turn before, and the fullest worker over the mean (95th percentile)."""
    chance = random.Random(1)
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 5)]
    app = App(ApiConfig.model_validate({"workers": urls, "affinity": {"enabled": enabled}}), None)
    for worker in app.workers.all:
        worker.ready, worker.models = True, {"m": {}}
    turns = [number for number in range(100) for _ in range(5)]
    home: dict[int, Worker] = {}
    running: list[Worker] = []
    found, uneven = [], []
    for number in sorted(turns, key=lambda _: chance.random()):
        messages = [{"role": "user", "content": f"question {number}"}]
        raw = json.dumps({"model": "m", "messages": messages}).encode()
        request = app.router.ask("/v1/chat/completions", {"Content-Type": "application/json"}, raw, None)
        worker = await app.router.take(request)
        if number in home:
            found.append(home[number] is worker)
        home[number] = worker
        running.append(worker)
        if len(running) == 32:
            loads = [worker.outstanding.total() for worker in app.workers.all]
            uneven.append(max(loads) / 8)
            app.router.release(running.pop(chance.randrange(32)))
    for worker in app.workers.all:
        await worker.close()
    return sum(found) / len(found), sorted(uneven)[len(uneven) * 95 // 100]


async def test_most_turns_find_their_worker_and_the_load_stays_even() -> None:
    found, uneven = await simulated(enabled=True)
    assert found >= 0.9 and uneven <= 1.65
    found, uneven = await simulated(enabled=False)
    assert found <= 0.4 and uneven <= 1.25


def router_of(board: Board, models: str, most: int, affinity: bool) -> tuple[Router, list[Worker]]:
    """Ready workers, one for each letter of `models`, which is its model. `most`: requests of one worker."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, len(models) + 1)]
    queue = {"requests_per_worker": most, "wait_seconds": 5}
    settings = {"workers": urls, "affinity": {"enabled": affinity}, "queue": queue}
    app = App(ApiConfig.model_validate(settings), None, board)
    for worker, model in zip(app.workers.all, models, strict=True):
        worker.ready, worker.models = True, {model: {}}
    return app.router, app.workers.all


def asking(router: Router, model: str, number: int) -> Ask:
    messages = [{"role": "user", "content": f"question {number}"}]
    raw = json.dumps({"model": model, "messages": messages}).encode()
    return router.ask("/v1/chat/completions", {"Content-Type": "application/json"}, raw, None)


async def picks(steps: list[int], affinity: bool, waits: str) -> list[int]:
    """Which of three workers for B each step's conversation gets; a negative step ends one that runs. `waits`: where
    a request for A waits meanwhile."""
    shared = Board.share(2)
    router, workers = router_of(shared, "ABBB", 64, affinity)
    waiting: list[asyncio.Task[Worker]] = []
    if waits == "here":
        workers[0].outstanding.add(64)
        waiting.append(asyncio.create_task(router.take(asking(router, "A", 0))))
        await asyncio.sleep(0)
    elif waits == "elsewhere":
        other = Board(2, 1, shared.descriptor)
        for name in ("waiting", "waiting normal A"):
            other.cell(name).add(1)
    found, running = [], []
    for step in steps:
        if step >= 0:
            running.append(await router.take(asking(router, "B", step)))
            found.append(workers.index(running[-1]))
        elif running:
            router.release(running.pop(-step % len(running)))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert shared.descriptor is not None
    os.close(shared.descriptor)
    return found


@given(steps=st.lists(st.integers(-5, 20), max_size=40), affinity=st.booleans())
def test_who_waits_for_another_model_changes_no_choice(steps: list[int], affinity: bool) -> None:
    alone = asyncio.run(picks(steps, affinity, "nowhere"))
    assert asyncio.run(picks(steps, affinity, "here")) == alone
    assert asyncio.run(picks(steps, affinity, "elsewhere")) == alone


@pytest.mark.parametrize("affinity", [True, False])
async def test_those_who_wait_get_the_best_worker_when_several_are_free_at_once(affinity: bool) -> None:
    """As when the workers of a model come back together: the first one does not get all."""
    router, workers = router_of(Board(), "BBBB", 12, affinity)
    for worker in workers:
        worker.outstanding.add(12)
    waiting = [asyncio.create_task(router.take(asking(router, "B", number))) for number in range(12)]
    await until(lambda: router.waiting.count == 12)
    for worker in workers:
        worker.outstanding.set(0)
    got = [await task for task in waiting]
    idle, _ = router_of(Board(), "BBBB", 12, affinity)
    expected = [await idle.take(asking(idle, "B", number)) for number in range(12)]
    assert [worker.url for worker in got] == [worker.url for worker in expected]
    assert max(Counter(worker.url for worker in got).values()) <= (5 if affinity else 3)


@dataclass
class Scored:
    seed: int
    load: int = 0
    names: list[bytes] = field(default_factory=list)


def place(beginning: bytes, workers: list[Scored], factor: float = 1.25) -> Scored | None:
    return warmest(beginning, [(worker.load, 0, worker) for worker in workers], factor)  # type: ignore


@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8, unique=True),
    loads=st.lists(st.integers(0, 20), min_size=8, max_size=8),
    factor=st.floats(1.0, 4.0),
    beginning=st.binary(max_size=8),
)
def test_the_bound_holds_and_some_worker_is_always_able(
    seeds: list[int], loads: list[int], factor: float, beginning: bytes
) -> None:
    workers = [Scored(seed, load) for seed, load in zip(seeds, loads, strict=False)]
    chosen = place(beginning, workers, factor)
    assert chosen is not None
    assert chosen.load < factor * (sum(worker.load for worker in workers) + 1) / len(workers)
    idle = [Scored(seed) for seed in seeds]
    favourite = place(beginning, idle, factor)
    assert favourite is not None
    unbounded = [Scored(worker.seed) for worker in workers if worker.seed != favourite.seed]
    if chosen.seed != favourite.seed:
        assert next(worker for worker in workers if worker.seed == favourite.seed).load > 0 and unbounded


def test_a_worker_that_leaves_moves_its_own_conversations_alone() -> None:
    workers = [Scored(mixed(number + 1)) for number in range(8)]
    names = [b"%d" % number for number in range(4000)]
    homes = {name: place(name, workers) for name in names}
    counts = Counter(home.seed for home in homes.values() if home)
    assert len(counts) == 8 and max(counts.values()) < 1.25 * 4000 / 8 and min(counts.values()) > 0.75 * 4000 / 8
    for name, home in homes.items():
        now = place(name, workers[1:])
        assert now is home or home is workers[0]
