"""Several sessions on one dispatcher: long requests give way, those at the same layer are computed together, and
whatever ends one of them leaves the others' answers right."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import EXPERTS, HIDDEN, LAYERS, STATUS, TOP_K, RawSession, eventually

from syshaxd import _core

LONG = 16
TOKEN_US = 10_000
"""What a token takes in the tests of slices: a long request is then a hundred times a brief one's patience."""


@pytest.fixture
def harness() -> Iterator[_core.TestHarness]:
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K)
    harness.start()
    yield harness
    harness.set_delay_us(0)
    harness.stop()


def right(session: RawSession, slot: int, asked: tuple[int, np.ndarray]) -> bool:
    tag, answer = asked
    return session.completion(slot, tag)["status"] == STATUS["OK"] and np.array_equal(
        session.output(slot, len(answer)).view(np.uint32), answer.view(np.uint32)
    )


def finished(session: RawSession, slot: int, tag: int) -> bool:
    return session.read("completion", "state", slot) == tag % (1 << 32)


@pytest.mark.parametrize("priority", [0, 1, 2])
def test_a_long_request_gives_way(harness: _core.TestHarness, priority: int) -> None:
    with RawSession(harness, 1) as long, RawSession(harness, 2, priority=priority) as brief:
        harness.set_delay_us(TOKEN_US)
        asked = long.ask(0, LONG)
        eventually(lambda: harness.forwards_running() == 1)
        for seed in range(3):
            assert right(brief, 0, brief.ask(0, 1, seed=seed))
            assert not finished(long, 0, asked[0])
        assert right(long, 0, asked)
        stats = long.stats()
        assert stats["queued_ns"] > 3 * TOKEN_US * 1000 * 0.9, "the time in which others computed counts as waiting"
        assert stats["charged_ns"] == pytest.approx(stats["compute_ns"], rel=0.01)


def test_requests_for_one_layer_are_computed_together(harness: _core.TestHarness) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(RawSession(harness, 1))
        others = [stack.enter_context(RawSession(harness, number)) for number in range(2, 6)]
        harness.hold()
        blocking = first.ask(0, 1, layer=0)
        eventually(lambda: harness.forwards_running() == 1)
        calls = harness.forward_calls()
        asked = [session.ask(0, 3 + number % 2, layer=2) for number, session in enumerate(others)]
        harness.release()
        assert right(first, 0, blocking)
        assert all(right(session, 0, wanted) for session, wanted in zip(others, asked, strict=True))
        assert harness.forward_calls() == calls + 2
        assert [session.stats()["batched"] for session in others] == [1] * 4


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=6),
    bad=st.integers(0, 7),
)
def test_any_mixture_is_answered_right(sizes: list[tuple[int, int, int]], bad: int) -> None:
    """Sizes, layers and classes at random; one of them may ask for an expert that does not exist."""
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K)
    harness.start()
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(RawSession(harness, number + 1, priority=priority))
            for number, (_, _, priority) in enumerate(sizes)
        ]
        harness.hold()
        asked = [session.ask(0, tokens, layer) for session, (tokens, layer, _) in zip(sessions, sizes, strict=True)]
        if bad < len(sessions):
            sessions[bad].area(0, "ids", np.int32)[0] = EXPERTS
        harness.release()
        for number, session in enumerate(sessions):
            if number == bad and session.completion(0, asked[number][0])["status"] == STATUS["BAD_EXPERT_ID"]:
                continue  # unless it had been read before it was made bad
            assert right(session, 0, asked[number])
    harness.stop()


def joined(harness: _core.TestHarness, stack: ExitStack) -> tuple[list[RawSession], list[tuple[int, np.ndarray]]]:
    """Three sessions whose requests are in one batch, which is being computed and takes long."""
    first = stack.enter_context(RawSession(harness, 9))
    sessions = [stack.enter_context(RawSession(harness, number)) for number in (1, 2, 3)]
    harness.hold()
    first.ask(0, 1, layer=0)
    eventually(lambda: harness.forwards_running() == 1)
    asked = [session.ask(0, 8, layer=3) for session in sessions]
    harness.set_delay_us(TOKEN_US)
    harness.release()
    eventually(lambda: all(session.read("header", "submit_head") != 0xFFFFFFC0 for session in sessions))
    eventually(lambda: first.stats()["requests"] == 1)
    return sessions, asked


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("how", ["leaves", "is ended", "breaks its queue", "truncates"])
def test_one_of_a_batch(harness: _core.TestHarness, who: int, how: str) -> None:
    """Leader or not: what happens to one changes nothing for the others."""
    with ExitStack() as stack:
        sessions, asked = joined(harness, stack)
        gone = sessions[who]
        if how == "leaves":
            harness.remove_session(gone.session_id)
        elif how == "is ended":
            harness.end_session(gone.session_id, STATUS["KICKED"])
            assert gone.read("header", "closing") == STATUS["KICKED"]
        elif how == "breaks its queue":
            gone.post(slot=77)
        else:
            os.ftruncate(gone.shm_fd, 8192)
        others = [
            (session, wanted)
            for number, (session, wanted) in enumerate(zip(sessions, asked, strict=True))
            if number != who
        ]
        assert all(right(session, 0, wanted) for session, wanted in others)
        harness.set_delay_us(0)
        for session, _ in others:
            session.works()
        if how == "truncates":
            harness.remove_session(gone.session_id)  # before its memory is looked at again
            os.ftruncate(gone.shm_fd, gone.layout["total_bytes"])


def test_a_session_leaves_in_the_middle_of_a_long_request(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1) as other:
        with RawSession(harness, 2) as gone:
            harness.set_delay_us(TOKEN_US)
            gone.ask(0, LONG)
            eventually(lambda: harness.forwards_running() == 1)
            begin = time.monotonic()
            harness.remove_session(gone.session_id)
            assert time.monotonic() - begin < LONG * TOKEN_US / 1e6 / 2, "it was computed to its end for nobody"
        harness.set_delay_us(0)
        other.works()


@pytest.mark.parametrize("how", ["model", "stop", "drain"])
def test_the_end_in_the_middle_of_a_long_request(how: str) -> None:
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K)
    harness.start()
    with RawSession(harness, 1) as one, RawSession(harness, 2) as two:
        harness.set_delay_us(TOKEN_US)
        asked = [session.ask(0, LONG) for session in (one, two)]
        eventually(lambda: all(session.stats()["in_flight"] == 1 for session in (one, two)))
        ends = {"model": harness.forget_model, "stop": harness.stop, "drain": lambda: harness.drain(20)}
        ending = Thread(target=ends[how])
        ending.start()
        for session, wanted in zip((one, two), asked, strict=True):
            if how == "drain":
                assert right(session, 0, wanted), "what was accepted is answered before the end"
            else:
                status = session.completion(0, wanted[0])["status"]
                assert status == STATUS["MODEL_GONE" if how == "model" else "SHUTTING_DOWN"]
        ending.join()
        harness.stop()


def test_a_share_is_a_limit(harness: _core.TestHarness) -> None:
    """A fifth of the time, even when nobody else wants it."""
    with RawSession(harness, 1, share=20) as limited, RawSession(harness, 2) as free:
        harness.set_delay_us(2000)
        begin = time.monotonic()
        for seed in range(40):
            assert right(limited, 0, limited.ask(0, 1, seed=seed))
        took, stats = time.monotonic() - begin, limited.stats()
        assert stats["charged_ns"] / 1e9 < 0.2 * took + 0.025
        assert stats["throttled_ns"] > 0 and stats["share"] == 20
        assert right(free, 0, free.ask(0, 1)) and free.stats()["throttled_ns"] == 0


MANY_TOKENS, MANY_EXPERTS = 65536, 8


def test_refused_requests_use_up_a_share_like_others(harness: _core.TestHarness) -> None:
    """Each costs the dispatcher a copy and a look at half a million ids, the last of which is bad."""
    with RawSession(harness, 1, share=1, max_tokens=MANY_TOKENS, top_k=MANY_EXPERTS, num_slots=2) as flooding:
        begin = time.monotonic()
        for number in range(24):
            ids = flooding.area(number % 2, "ids", np.int32)[: MANY_TOKENS * MANY_EXPERTS]
            ids[:-1], ids[-1] = 0, EXPERTS
            del ids
            wanted = flooding.post(slot=number % 2, layer=1, num_tokens=MANY_TOKENS, top_k=MANY_EXPERTS)
            assert flooding.completion(number % 2, wanted, 30)["status"] == STATUS["BAD_EXPERT_ID"]
        took, stats = time.monotonic() - begin, flooding.stats()
        assert stats["throttled_ns"] > 0 and stats["errors"] == 24
        assert stats["charged_ns"] / 1e9 < 0.01 * took + 0.010, "a hundredth, and the last one's whole time"


def test_nobody_is_asked_for_more_ids_than_a_slice_can_check(harness: _core.TestHarness) -> None:
    with pytest.raises(_core.CoreError, match="65536 with top_k 17 is more than 1048576") as caught:
        RawSession(_core.TestHarness(LAYERS, 32, HIDDEN, TOP_K), 1, max_tokens=65536, top_k=17)
    assert caught.value.code == "invalid_argument"


def test_requests_that_cannot_be_queued_are_all_answered(harness: _core.TestHarness) -> None:
    """More than the dispatcher refuses in one turn: a slot that is busy is asked for again and again."""
    with RawSession(harness, 1, num_slots=32) as session, RawSession(harness, 2) as other:
        harness.set_delay_us(10 * TOKEN_US)
        asked = session.ask(0, LONG)
        eventually(lambda: harness.forwards_running() == 1)
        for _ in range(20):
            session.post(slot=0, layer=1, num_tokens=1)
        eventually(lambda: session.stats()["errors"] == 20)
        harness.set_delay_us(0)
        assert right(session, 0, asked) and right(other, 0, other.ask(0, 1))


def test_statistics_of_waiting_and_service(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1) as session:
        harness.set_delay_us(3000)
        for seed in range(5):
            assert right(session, 0, session.ask(0, 2, seed=seed))
        stats = session.stats()
        assert 0.85 * 6000 < stats["service_us_p50"] <= stats["service_us_p99"]
        assert 0 <= stats["wait_us_p50"] <= stats["wait_us_p99"] < stats["service_us_p99"]
        assert stats["tokens_in_flight"] == 0 and stats["in_flight"] == 0
