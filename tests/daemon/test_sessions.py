"""Classes, shares and limits of sessions: who may ask for what, who may change it, what is seen of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Daemon, eventually
from fake_core import FakeCore
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from syshax.errors import LimitError, NotAllowedError
from syshax.protocol import AttachRequest, Priority, SessionChange, SessionInfo
from syshaxd.admission import check_limits
from syshaxd.config import Config
from syshaxd.peers import Peer
from syshaxd.session_totals import Ledger, Totals

REQUEST = {"model": "tiny", "client": "test", "max_tokens": 16}
MIB = 1 << 20


def classes(daemon: Daemon) -> dict[int, tuple[int, int]]:
    return daemon.core.runtime.classes


async def set_config(daemon: Daemon, **values: Any) -> None:
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    status, answer = await daemon.json("PATCH", "/v1/config", {"values": dotted})
    assert status == 200, answer


async def metric(daemon: Daemon, name: str) -> dict[str, float]:
    """By priority."""
    text = (await daemon.http("GET", "/metrics"))[2].decode()
    return {
        sample.labels["priority"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def test_class_share_and_weights_reach_the_core(daemon: Daemon) -> None:
    assert daemon.core.runtime.weights == [16, 4, 1]
    first, one, _ = await daemon.attach({**REQUEST, "priority": "interactive"})
    second, two, _ = await daemon.attach(REQUEST)
    assert classes(daemon) == {one["session_id"]: (0, 100), two["session_id"]: (1, 100)}
    await set_config(daemon, scheduling__interactive=9, scheduling__batch=2, scheduling__share=40)
    await eventually(lambda: daemon.core.runtime.weights == [9, 4, 2], "the new weights")
    await eventually(lambda: set(classes(daemon).values()) == {(0, 40), (1, 40)}, "the new share of attached sessions")
    third, three, _ = await daemon.attach({**REQUEST, "priority": "batch"})
    assert classes(daemon)[three["session_id"]] == (2, 40)
    for connection in (first, second, third):
        connection.close()


async def test_a_session_is_given_another_class_and_share(daemon: Daemon) -> None:
    connection, answer, _ = await daemon.attach(REQUEST)
    number = answer["session_id"]
    status, info = await daemon.json("PATCH", f"/v1/sessions/{number}", {"priority": "batch", "share": 50})
    assert status == 200 and (info["priority"], info["share"]) == ("batch", 50)
    assert classes(daemon)[number] == (2, 50)
    status, info = await daemon.json("PATCH", f"/v1/sessions/{number}", {"priority": "interactive"})
    assert (info["priority"], info["share"]) == ("interactive", 50) and classes(daemon)[number] == (0, 50)
    await set_config(daemon, scheduling__share=10)
    await asyncio.sleep(0.05)
    assert classes(daemon)[number] == (0, 50), "what was set for the session holds"
    (listed,) = (await daemon.json("GET", "/v1/sessions"))[1]["sessions"]
    assert listed["priority"] == "interactive" and listed["share"] == 50
    connection.close()


@pytest.mark.parametrize(
    ("number", "body", "status", "words"),
    [
        ("1", {}, 400, "neither priority nor share"),
        ("1", {"priority": "urgent"}, 400, "priority"),
        ("1", {"share": 0}, 400, "share"),
        ("1", {"share": 101}, 400, "share"),
        ("1", {"pid": 3}, 400, "pid is not a field"),
        ("99", {"share": 5}, 404, "no session 99"),
        ("x", {"share": 5}, 400, "not a session's number"),
        ("9" * 40, {"share": 5}, 400, "not a session's number"),
    ],
)
async def test_changes_that_make_no_sense(
    daemon: Daemon, number: str, body: dict[str, Any], status: int, words: str
) -> None:
    connection, _, _ = await daemon.attach(REQUEST)
    found, answer = await daemon.json("PATCH", f"/v1/sessions/{number}", body)
    assert found == status and words in answer["error"]["message"]
    assert classes(daemon) == {1: (1, 100)}
    connection.close()


@pytest.mark.parametrize(
    ("uid", "change", "allowed"),
    [
        (1000, {"priority": "batch"}, True),
        (1000, {"share": 20}, True),
        (1000, {"priority": "normal", "share": 100}, True),
        (1000, {"priority": "interactive"}, False),
        (1000, {"priority": "batch", "share": 60}, True),
        (1001, {"priority": "batch"}, False),
        (0, {"priority": "interactive"}, True),
    ],
)
async def test_ones_own_session_may_only_be_lowered(
    start: Callable[..., Any], daemon: Daemon, monkeypatch: Any, uid: int, change: dict[str, Any], allowed: bool
) -> None:
    connection, answer, _ = await daemon.attach(REQUEST)
    session = daemon.server.parts.sessions.get(answer["session_id"])
    session.peer = Peer(1, 1000, 1000, frozenset())
    monkeypatch.setattr("syshaxd.control.routes.peer_of", lambda _: Peer(2, uid, uid, frozenset([uid])))
    monkeypatch.setattr("syshaxd.control.rights.Rights.is_administrator", lambda _, peer: peer.uid == 0)
    status, answer = await daemon.json("PATCH", f"/v1/sessions/{session.session_id}", change)
    assert status == (200 if allowed else NotAllowedError.http_status), answer
    connection.close()


async def test_a_lowered_share_cannot_be_raised_by_its_owner(daemon: Daemon) -> None:
    connection, answer, _ = await daemon.attach(REQUEST)
    sessions = daemon.server.parts.sessions
    session = sessions.get(answer["session_id"])
    await sessions.change(session, SessionChange(share=30))
    assert not sessions.only_lowers(session, SessionChange(share=31))
    assert not sessions.only_lowers(session, SessionChange(priority=Priority.BATCH, share=100))
    assert sessions.only_lowers(session, SessionChange(priority=Priority.BATCH, share=30))
    connection.close()


async def test_the_highest_class_may_be_capped(daemon: Daemon) -> None:
    await set_config(daemon, scheduling__highest="normal")
    connection, answer, _ = await daemon.attach({**REQUEST, "priority": "interactive"})
    assert answer["error"]["code"] == "limit" and "scheduling.highest" in answer["error"]["message"]
    assert "syshaxctl sessions set" in answer["error"]["hint"]
    connection.close()
    connection, answer, _ = await daemon.attach(REQUEST)
    status, info = await daemon.json("PATCH", f"/v1/sessions/{answer['session_id']}", {"priority": "interactive"})
    assert status == 200 and info["priority"] == "interactive", "an administrator goes above it"
    connection.close()


async def test_tokens_in_flight_are_limited(daemon: Daemon) -> None:
    await set_config(daemon, limits__tokens_in_flight=64)
    connection, answer, _ = await daemon.attach({**REQUEST, "num_slots": 5})
    assert "num_slots x max_tokens would be 80, limits.tokens_in_flight allows 64" in answer["error"]["message"]
    connection.close()
    connection, answer, _ = await daemon.attach({**REQUEST, "num_slots": 4})
    assert "session_id" in answer
    connection.close()


def attach_request(**fields: Any) -> AttachRequest:
    return AttachRequest(**{"model": "m", "max_tokens": 1, **fields})


class Attached:
    def __init__(self, uid: int, shm_bytes: int) -> None:
        self.peer, self.shm_bytes = Peer(1, uid, uid, frozenset()), shm_bytes


def test_todays_default_sessions_pass() -> None:
    largest = Config().limits.tokens_per_session
    for slots, tokens in ((2, largest), (16, 8192), (2, 512), (1, 65536)):
        check_limits(attach_request(num_slots=slots, max_tokens=tokens), MIB, Peer(1, 7, 7, frozenset()), [], Config())


@given(st.integers(1, 40), st.integers(1, 100), st.integers(1, 60), st.integers(0, 30))
def test_one_user_leaves_the_others_some(sessions: int, part: int, memory: int, held: int) -> None:
    config = Config.model_validate(
        {"limits": {"sessions": sessions, "user_part": part, "shared_memory_total": memory * MIB}}
    )
    attached = [Attached(7, MIB)] * held
    allowed = held + 1 <= max(1, sessions * part // 100) and (held + 1) * MIB <= memory * MIB * part // 100
    in_all = held + 1 <= sessions and held + 1 <= memory

    def refused(uid: int) -> bool:
        try:
            check_limits(attach_request(), MIB, Peer(1, uid, uid, frozenset()), attached, config)
        except LimitError:
            return True
        return False

    assert refused(7) == (not (allowed and in_all))
    assert refused(0) == refused(os.geteuid()) == (not in_all), "root and the daemon's user may take all"
    first = memory * MIB * part // 100 >= MIB
    assert refused(8) == (not (in_all and first)), "another user is not held to what the first has"


async def test_what_the_list_tells(daemon: Daemon) -> None:
    connection, _, _ = await daemon.attach({**REQUEST, "priority": "batch"})
    (row,) = (await daemon.json("GET", "/v1/sessions"))[1]["sessions"]
    info = SessionInfo.model_validate(row)
    assert (info.wait_ms_p50, info.wait_ms_p99) == (0.01, 0.25)
    assert (info.service_ms_p50, info.service_ms_p99) == (1.0, 3.0)
    assert (info.tokens_in_flight, info.batched, info.throttled_ms_total) == (16, 2, 7.0)
    assert 0 < info.use <= 1
    connection.close()


def test_use_is_the_charged_time_of_the_last_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("syshaxd.session_totals.time.monotonic", lambda: clock[0])

    class Session:
        session_id, attached_at = 1, 100.0

    ledger, charged = Ledger(), 0
    for seconds, busy in ((2, 1.0), (2, 1.0), (2, 0.0), (2, 0.0), (2, 0.0), (2, 0.0)):
        clock[0] += seconds
        charged += int(busy * seconds * 1e9)
        ledger.sample({1: {"charged_ns": charged}})
    assert ledger.use(Session(), {"charged_ns": charged}) == 0.0, "what was long ago counts no more"
    clock[0] += 2
    use = ledger.use(Session(), {"charged_ns": charged + int(1e9)})
    assert use == pytest.approx(1 / 8)
    young = Session()
    young.session_id, young.attached_at = 2, clock[0] - 0.5
    assert ledger.use(young, {"charged_ns": int(0.25e9)}) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.sampled_from(["work", "batch", "normal", "interactive", "end"]), st.integers(0, 50))))
def test_counters_of_classes_never_go_back_and_lose_nothing(steps: list[tuple[str, int]]) -> None:
    class Entry:
        name = "m"

    class Session:
        session_id, entry = 1, Entry()

        def __init__(self) -> None:
            self.priority, self.reclassed, self.done = Priority.NORMAL, Totals(), 0

    ledger, living = Ledger(), Session()
    expected, before = dict.fromkeys(Priority, 0), dict.fromkeys(Priority, 0)
    for what, amount in steps:
        stats = {"requests": living.done}
        if what == "work":
            living.done += amount
            expected[living.priority] += amount
        elif what == "end":
            ledger.close(living, stats)
            living = Session()
        else:
            ledger.reclass(living, stats)
            living.priority = Priority(what)
        now = ledger.by_class([living], {1: {"requests": living.done}})
        found = {priority: totals.requests for priority, totals in now.items()}
        assert found == expected and all(found[priority] >= before[priority] for priority in Priority)
        assert ledger.by_model([living], {1: {"requests": living.done}})["m"].requests == sum(expected.values())
        before = found


async def test_metrics_by_class(daemon: Daemon) -> None:
    connection, answer, _ = await daemon.attach({**REQUEST, "priority": "batch"})
    assert await metric(daemon, "syshax_class_sessions") == {"interactive": 0, "normal": 0, "batch": 1}
    assert (await metric(daemon, "syshax_class_requests_total"))["batch"] == 3
    assert (await metric(daemon, "syshax_class_wait_p99_seconds"))["batch"] == pytest.approx(0.00025)
    await daemon.json("PATCH", f"/v1/sessions/{answer['session_id']}", {"priority": "normal"})
    assert (await metric(daemon, "syshax_class_requests_total")) == {"interactive": 0, "normal": 0, "batch": 3}
    connection.close()
    await eventually(lambda: not daemon.core.runtime.sessions)
    assert (await metric(daemon, "syshax_class_requests_total"))["batch"] == 3
    assert (await metric(daemon, "syshax_class_sessions"))["normal"] == 0


async def test_sessions_are_kicked_while_they_attach(start: Callable[..., Any], daemon: Daemon) -> None:
    """A session that is ended before it is served leaves nothing."""
    connections = [daemon.dial() for _ in range(10)]
    for connection in connections:
        connection.send(json.dumps(REQUEST).encode())
    for number in range(1, 11):
        await daemon.json("DELETE", f"/v1/sessions/{number}")
    for connection in connections:
        connection.close()
    await eventually(lambda: len(daemon.server.parts.sessions) == 0, "the sessions' end")
    assert isinstance(daemon.core, FakeCore) and not daemon.core.runtime.sessions
