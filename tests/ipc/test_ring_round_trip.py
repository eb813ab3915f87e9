"""Round trips over the bare ring: every dtype and shape, the wrap of the 32-bit positions, order, sleep and wake."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import EXPERTS, HIDDEN, LAYERS, SPIN_FIXED, STATUS, TOP_K, RawSession, batch, eventually, reference

from syshax.protocol import Dtype
from syshaxd import _core


@pytest.fixture(scope="module")
def harness() -> Iterator[_core.TestHarness]:
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K)
    harness.start()
    yield harness
    harness.stop()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(Dtype)),
    tokens=st.integers(1, 33),
    layer=st.integers(0, LAYERS - 1),
    num_slots=st.integers(1, 64),
    slot=st.integers(0, 63),
    seed=st.integers(0, 1 << 20),
)
def test_every_dtype_and_shape(
    harness: _core.TestHarness, dtype: Dtype, tokens: int, layer: int, num_slots: int, slot: int, seed: int
) -> None:
    slot %= num_slots
    with RawSession(harness, 1, max_tokens=33, num_slots=num_slots) as session:
        x, ids, weights = batch(tokens, dtype, seed)
        session.fill(slot, x, ids, weights)
        tag = session.post(slot=slot, layer=layer, num_tokens=tokens, dtype=dtype.ring_code)
        completion = session.completion(slot, tag)
        assert completion["status"] == STATUS["OK"] and completion["tag"] == tag
        words = np.uint32 if dtype is Dtype.FLOAT32 else np.uint16
        got = session.area(slot, "output", words)[: x.size].copy()
        np.testing.assert_array_equal(got, reference(layer, x, ids, weights).view(words).ravel())


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 7, 64])
def test_positions_pass_over_the_32_bit_wrap(harness: _core.TestHarness, num_slots: int) -> None:
    """Positions begin shortly before 2^32; a number of slots that does not divide 2^32 must not lose its place."""
    with RawSession(harness, 1, num_slots=num_slots) as session:
        for _ in range(150):
            session.works()
        assert session.position > 1 << 32
        assert session.read("header", "submit_head") == session.position % (1 << 32)
        assert session.stats()["requests"] == 150


def test_one_session_is_first_in_first_out_and_sessions_take_turns(harness: _core.TestHarness) -> None:
    """Queued behind a held request: eight of one session, then one of another, which comes second, not ninth."""
    with RawSession(harness, 1, num_slots=9) as many, RawSession(harness, 2) as one:
        ids = np.zeros((1, TOP_K), np.int32)
        for session, slot in [*((many, s) for s in range(9)), (one, 0)]:
            session.fill(slot, np.zeros((1, HIDDEN), np.float32), ids, np.ones((1, TOP_K), np.float32))
        harness.hold()
        first = many.post(slot=0)
        eventually(harness.forwards_running)
        tags = [first] + [many.post(slot=slot) for slot in range(1, 9)]
        other = one.post(slot=0)
        harness.set_delay_us(1000)
        harness.release()
        waits = [many.completion(slot, tag)["queued_ns"] for slot, tag in enumerate(tags)]
        harness.set_delay_us(0)
        assert waits[1:] == sorted(waits[1:])  # the first was not waiting: its time is that of waking up
        assert one.completion(0, other)["queued_ns"] < waits[3]


def test_a_sleeping_dispatcher_is_parked_and_wakes(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1) as session:
        for _ in range(20):
            session.works()
            eventually(lambda: session.read("header", "parked") == 1)
        assert harness.stats()["heartbeat_age_ns"] == 0


def test_an_awake_dispatcher_needs_no_doorbell() -> None:
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K, spin_us=SPIN_FIXED | 2_000_000)
    harness.start()
    with RawSession(harness, 1, spin_us=1) as session:
        session.works()
        assert session.read("header", "parked") == 0
        session.fill(0, *batch(1))
        tag = session.tag + 1
        session.post(slot=0)
        beats = session.read("header", "daemon_heartbeat")
        assert session.completion(0, tag)["status"] == STATUS["OK"]
        eventually(lambda: session.read("header", "daemon_heartbeat") > beats)
    harness.stop()


def test_nothing_spins_beside_a_client_that_shares_the_cpus() -> None:
    """The dispatcher may look for two seconds, but sleeps at once as long as one session's client must not spin."""
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K, spin_us=2_000_000)
    harness.start()
    with RawSession(harness, 1, spin_us=1), RawSession(harness, 2) as shared:
        shared.works()
        before, begin = time.process_time(), time.monotonic()
        for _ in range(40):
            shared.works()
            time.sleep(0.01)
            assert shared.read("header", "parked") == 1
        assert time.process_time() - before < (time.monotonic() - begin) / 2
    harness.stop()


def test_idle_costs_no_cpu(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1) as session:
        session.works()
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.01


def test_times_are_reported(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1) as session:
        session.fill(0, *batch(1))
        harness.set_delay_us(20_000)
        tag = session.post(slot=0)
        session.completion(0, tag)
        harness.set_delay_us(0)
        assert 20e6 <= session.read("completion", "compute_ns") < 2e9
        stats = session.stats()
        assert stats["compute_ns"] >= 20e6 and stats["tokens"] == 1 and stats["last_active_ns_ago"] < 5e9
