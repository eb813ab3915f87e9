"""Readiness with the daemon's word: whose session is whose, what is lost and found again, and what is not known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from fake_daemon import FakeDaemon, session
from front_fixtures import Front, Setup, bearer, error_of, until, write_keys

from syshaxd.frontend import daemon_view
from syshaxd.frontend.daemon_view import DaemonView, Experts


@pytest.fixture
async def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeDaemon]:
    monkeypatch.setattr(daemon_view, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(daemon_view, "GRACE_SECONDS", 0.3)
    daemon = FakeDaemon(tmp_path / "view.sock")
    await daemon.start()
    yield daemon
    await daemon.stop()


async def front_of(setup: Setup, daemon: FakeDaemon, *workers: Any, wait_seconds: float = 0) -> Front:
    return await setup.front(*workers, daemon={"view_socket": str(daemon.path), "wait_seconds": wait_seconds})


def experts(front: Front) -> list[str]:
    return [worker.experts.state for worker in front.app.workers.all]


async def test_ready_while_attached_and_healed_by_itself(setup: Setup, daemon: FakeDaemon) -> None:
    worker = await setup.worker()
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker)
    await until(lambda: experts(front) == ["attached"])
    assert (await front.chat()).status == 200
    daemon.sessions = []
    begun = monotonic()
    await until(lambda: not front.app.workers.all[0].ready)
    assert 0.2 < monotonic() - begun < 1.3, "after the grace time, and soon"
    error = await error_of(await front.chat(), 503, "not_ready")
    assert "experts are not attached: syshaxd has no session of it" in error["message"]
    answer = json.loads(await (await front.session.get("/ready")).read())
    assert (answer["workers"][0]["experts"], answer["daemon"]) == ("missing", "answers")
    daemon.sessions = [session(worker.url, 2)]
    await front.until_ready(1)
    assert experts(front) == ["attached"] and (await front.chat()).status == 200


async def test_a_daemon_that_is_gone_is_noticed_and_found_again(setup: Setup, daemon: FakeDaemon) -> None:
    worker, stranger = await setup.worker(), await setup.worker("other")
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker, stranger)
    await until(lambda: experts(front) == ["attached", "not known"])
    await daemon.stop()
    await until(lambda: not front.app.workers.all[0].ready)
    assert "syshaxd cannot be asked (no such file or directory)" in front.app.workers.all[0].reason
    assert front.app.workers.all[1].ready, "what is not known is not held against a worker"
    ready = await front.session.get("/ready")
    assert ready.status == 200 and json.loads(await ready.read())["daemon"] == "no such file or directory"
    await daemon.start()
    await front.until_ready(2)


async def test_a_short_absence_costs_no_request(setup: Setup, daemon: FakeDaemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(daemon_view, "GRACE_SECONDS", 30.0)
    worker = await setup.worker()
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker)
    await until(lambda: experts(front) == ["attached"])
    await daemon.stop()
    await until(lambda: experts(front) == ["missing"])
    assert front.app.workers.all[0].ready and (await front.chat()).status == 200


async def test_requests_wait_in_their_worker_for_a_daemon_that_restarts(setup: Setup, daemon: FakeDaemon) -> None:
    worker, other = await setup.worker("m"), await setup.worker("n", "o")
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker, other, wait_seconds=1.0)
    await until(lambda: experts(front) == ["attached", "not known"])
    await daemon.stop()
    begun = monotonic()
    await until(lambda: not front.app.workers.all[0].ready)
    assert (await front.chat()).status == 200, "vLLM holds it until the daemon is back"
    await until(lambda: not front.app.workers.all[0].waits_for_experts)
    assert monotonic() - begun >= 0.8
    await error_of(await front.chat(), 503, "not_ready")


async def test_a_key_for_some_models_is_held_to_them_while_workers_wait(
    setup: Setup, daemon: FakeDaemon, tmp_path: Path
) -> None:
    worker = await setup.worker("m", "n")
    daemon.sessions = [session(worker.url)]
    view = {"view_socket": str(daemon.path), "wait_seconds": 60}
    keys = write_keys(tmp_path / "keys.toml", {"sk-some": {"models": ["m"]}})
    front = await setup.front(worker, keys=keys, daemon=view)
    await until(lambda: experts(front) == ["attached"])
    daemon.sessions = []
    await until(lambda: not front.app.workers.all[0].ready)
    for model, status in ({"model": "m"}, 200), ({"model": "n"}, 404), ({}, 400):
        answer = await front.session.post("/v1/chat/completions", json=model, headers=bearer("sk-some"))
        assert answer.status == status


async def test_while_another_worker_is_ready_nobody_waits(setup: Setup, daemon: FakeDaemon) -> None:
    worker, other = await setup.worker(), await setup.worker()
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker, other, wait_seconds=60)
    await until(lambda: experts(front) == ["attached", "not known"])
    daemon.sessions = []
    await until(lambda: not front.app.workers.all[0].ready)
    for _ in range(4):
        assert (await front.chat()).status == 200
    assert not worker.seen and len(other.seen) == 4


async def test_a_stopped_process_counts_as_gone(setup: Setup, daemon: FakeDaemon) -> None:
    worker = await setup.worker()
    daemon.sessions = [session(worker.url), session(worker.url, 7)]
    front = await front_of(setup, daemon, worker)
    await until(lambda: experts(front) == ["attached"])
    daemon.sessions = [session(worker.url), session(worker.url, 7, stale=True)]
    await until(lambda: not front.app.workers.all[0].ready)
    assert "the process of session 7 is stopped" in front.app.workers.all[0].reason


async def test_a_worker_that_does_not_answer_says_that_and_not_its_experts(setup: Setup, daemon: FakeDaemon) -> None:
    worker = await setup.worker()
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker)
    await until(lambda: experts(front) == ["attached"])
    await worker.stop()
    await until(lambda: front.app.workers.all[0].reason == "connection refused")
    await worker.start(worker.url)
    await front.until_ready(1)


async def test_one_poll_serves_all_workers(setup: Setup, daemon: FakeDaemon) -> None:
    workers = [await setup.worker() for _ in range(4)]
    daemon.sessions = [session(worker.url, number) for number, worker in enumerate(workers)]
    front = await front_of(setup, daemon, *workers)
    await until(lambda: experts(front) == ["attached"] * 4)
    assert set(daemon.asked) == {"/v1/sessions"}
    before, begun = len(daemon.asked), monotonic()
    await until(lambda: monotonic() - begun > 0.5)
    assert len(daemon.asked) - before <= 12, "and it does not grow with them"


async def test_nobody_is_asked_without_a_socket(setup: Setup, daemon: FakeDaemon) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, daemon={"view_socket": ""})
    assert (await front.chat()).status == 200 and not daemon.asked
    assert json.loads(await (await front.session.get("/ready")).read())["daemon"] == "not asked"


@pytest.mark.parametrize(
    ("url", "address", "same"),
    [
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001", True),
        ("http://127.0.0.1:8001", "http://0.0.0.0:8001", True),
        ("http://localhost:8001", "http://127.0.0.1:8001", True),
        ("http://localhost:8001", "http://[::]:8001", True),
        ("https://localhost", "http://0.0.0.0:443", True),
        ("http://127.0.0.1:8001", "http://0.0.0.0:8002", False),
        ("http://192.0.2.1:8001", "http://0.0.0.0:8001", False),  # another machine's
        ("http://no-such-host.invalid:8001", "http://0.0.0.0:8001", False),
        ("http://127.0.0.1:8001", "http://192.0.2.1:8001", False),
        ("unix:/run/w.sock", "unix:/run/../run/w.sock", True),
        ("unix:/run/w.sock", "unix:/run/v.sock", False),
        ("unix:/run/w.sock", "http://0.0.0.0:80", False),
        ("http://127.0.0.1:80", "", False),
        ("http://127.0.0.1:80", "nonsense", False),
        ("http://127.0.0.1:80", "http://[:80", False),
        ("http://127.0.0.1:80", "http://0.0.0.0:999999", False),
    ],
)
async def test_whose_session_it_is(url: str, address: str, same: bool) -> None:
    view, mine = DaemonView(""), Experts(url)
    view.sessions = [session(address)]
    view.names.look_up({daemon_view._place(address)[0]})
    mine.look(view)
    await until(lambda: all(name.task is None for name in view.names._names.values()))
    mine.look(view)
    assert (mine.state == "attached") == same
    await view.close()


class NameServer:
    """Answers for names that end in .slow when the test says so, for others at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = asyncio.Event()
        self.asked: list[str] = []
        loop = asyncio.get_running_loop()
        real = loop.getaddrinfo

        async def look_up(host: Any, *args: Any, **more: Any) -> Any:
            if str(host).endswith(".slow"):
                self.asked.append(str(host))
                await self.answers.wait()
                return await real("127.0.0.1", *args, **more)
            return await real(host, *args, **more)

        monkeypatch.setattr(loop, "getaddrinfo", look_up)


async def test_nobody_waits_for_a_name_server(
    setup: Setup, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, worker = NameServer(monkeypatch), await setup.worker()
    daemon.sessions = [session("http://session.slow:8000", 1), session(worker.url, 2)]
    front = await front_of(setup, daemon, worker, "http://worker.slow:8000")
    await until(lambda: experts(front) == ["attached", "not known"])
    asked, before = len(daemon.asked), front.app.workers.all[0].experts._good_at
    await until(lambda: len(daemon.asked) > asked + 12)
    assert front.app.workers.all[0].experts._good_at > before + 0.3 and experts(front)[0] == "attached"
    await daemon.stop()
    await until(lambda: not front.app.workers.all[0].ready, 1.5)
    assert "session.slow" in server.asked
    tasks = [name.task for name in front.app.workers.view.names._names.values() if name.task is not None]
    assert tasks, "the name server has said nothing yet"
    await front.app.workers.close()
    assert all(task.done() for task in tasks)


async def test_a_name_is_known_when_the_name_server_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    server = NameServer(monkeypatch)
    view, mine = DaemonView(""), Experts("http://worker.slow:8001")
    view.sessions = [session("http://session.slow:8001")]
    view.names.look_up(["session.slow"])
    mine.look(view)
    assert mine.state == "not known"
    server.answers.set()
    await until(lambda: all(name.task is None for name in view.names._names.values()))
    mine.look(view)
    assert mine.state == "attached" and sorted(server.asked) == ["session.slow", "worker.slow"], "each was asked once"


async def test_sessions_with_many_names_make_no_worker_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for at each poll stays, whatever else sessions name."""
    NameServer(monkeypatch)
    view, mine = DaemonView(""), Experts("http://localhost:8001")
    view.sessions = [session("http://127.0.0.1:8001")]
    view.names.look_up(["127.0.0.1"])
    mine.look(view)
    await until(lambda: bool(view.names.addresses("localhost")))
    for poll in range(12):
        view.names.look_up(["127.0.0.1", *(f"host{poll * 100 + number}.slow" for number in range(100))])
        mine.look(view)
        assert mine.state == "attached"
    assert len(view.names._names) == daemon_view._NAMES
    await view.close()


async def test_an_answer_that_is_none_is_told(setup: Setup, daemon: FakeDaemon) -> None:
    worker = await setup.worker()
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker)
    await until(lambda: experts(front) == ["attached"])
    daemon.nonsense = True
    await until(lambda: not front.app.workers.all[0].ready)
    assert "it answers something else than expected" in front.app.workers.all[0].reason


async def test_a_busy_daemon_is_given_time_and_a_stuck_one_is_not(
    setup: Setup, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_view, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(daemon_view, "SILENT_SECONDS", 1.0)
    worker = await setup.worker()
    daemon.sessions = [session(worker.url)]
    front = await front_of(setup, daemon, worker)
    await until(lambda: experts(front) == ["attached"])
    daemon.silent = True
    begun = monotonic()
    await until(lambda: not front.app.workers.all[0].ready)
    assert monotonic() - begun >= 1.0 and "no answer in 0.1 s" in front.app.workers.all[0].reason
    daemon.silent = False
    await front.until_ready(1)
