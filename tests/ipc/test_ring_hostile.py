"""A client may write anything anywhere at any time: never a crash, never another session's harm, always an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import EXPERTS, HIDDEN, LAYERS, STATUS, TOP_K, RawSession, batch, eventually

from syshaxd import _core


@pytest.fixture(scope="module", params=[False, True], ids=["dispatcher's thread", "kernels' thread"])
def harness(request: pytest.FixtureRequest) -> Iterator[_core.TestHarness]:
    harness = _core.TestHarness(LAYERS, EXPERTS, HIDDEN, TOP_K, worker_thread=request.param)
    harness.start()
    yield harness
    harness.stop()


@pytest.fixture(scope="module")
def bystander(harness: _core.TestHarness) -> Iterator[RawSession]:
    with RawSession(harness, 1000) as session:
        yield session
        session.works()


DESCRIPTOR = st.binary(min_size=64, max_size=64)
EXTREME = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]) | st.integers(0, (1 << 32) - 1)
PLAUSIBLE = st.builds(
    lambda tag, words: tag.to_bytes(8, "little") + b"".join(w.to_bytes(4, "little") for w in words) + bytes(32),
    st.integers(0, (1 << 64) - 1),
    st.tuples(st.sampled_from([0, 1, 2]), EXTREME, EXTREME, EXTREME, st.integers(0, 4), st.integers(0, 1)),
)


@settings(max_examples=80, deadline=None)
@given(requests=st.lists(DESCRIPTOR | PLAUSIBLE, min_size=1, max_size=6), ids=st.binary(min_size=64, max_size=64))
def test_random_descriptors(
    harness: _core.TestHarness, bystander: RawSession, requests: list[bytes], ids: bytes
) -> None:
    with RawSession(harness, 1) as session:
        for slot in range(2):
            session.area(slot, "ids", np.uint8)[:64] = np.frombuffer(ids, np.uint8)
        for raw in requests:
            session.post(raw)
        bystander.works()
        stats = session.stats()
        if not stats["poisoned"]:
            eventually(lambda: session.stats()["in_flight"] == 0)


@settings(max_examples=40, deadline=None)
@given(tail=EXTREME)
def test_any_tail(harness: _core.TestHarness, bystander: RawSession, tail: int) -> None:
    with RawSession(harness, 1) as session:
        session.publish(tail)
        bystander.works()
        ahead = (tail - STATUS["first_position"]) % (1 << 32)
        assert session.stats()["poisoned"] == (ahead != 0)  # the queue's own zeros are no request either
        assert session.read("header", "closing") == (STATUS["BROKEN_QUEUE"] if ahead else STATUS["OPEN"])


@settings(max_examples=40, deadline=None)
@given(noise=st.binary(min_size=320, max_size=320), seed=st.integers(0, 1000))
def test_a_rewritten_header_leads_nowhere(
    harness: _core.TestHarness, bystander: RawSession, noise: bytes, seed: int
) -> None:
    """Offsets, sizes and counts in the header are for the client alone; the daemon never reads them back."""
    with RawSession(harness, 1) as session:
        tail, size = ABI_TAIL
        session.memory[:tail] = noise[:tail]
        session.works()
        session.memory[tail + size : 320] = noise[tail + size :]
        session.works()
        bystander.works()


ABI_TAIL: tuple[int, int] = _core.ring_abi()["syshax_ring_header"]["fields"]["submit_tail"]


@pytest.mark.parametrize(
    ("fields", "status", "detail"),
    [
        ({"flags": 1}, "BAD_REQUEST", 0),
        ({"dtype": 3}, "BAD_REQUEST", 0),
        ({"dtype": 0xFFFFFFFF}, "BAD_REQUEST", 0),
        ({"layer": LAYERS}, "BAD_LAYER", LAYERS),
        ({"layer": 0xFFFFFFFF}, "BAD_LAYER", -1),
        ({"num_tokens": 0}, "BAD_SHAPE", 0),
        ({"num_tokens": 17}, "BAD_SHAPE", 17),
        ({"num_tokens": 0x80000000}, "BAD_SHAPE", -(1 << 31)),
        ({"top_k": 0}, "BAD_SHAPE", 0),
        ({"top_k": TOP_K + 1}, "BAD_SHAPE", TOP_K + 1),
    ],
)
def test_each_field_is_checked(harness: _core.TestHarness, fields: dict[str, int], status: str, detail: int) -> None:
    with RawSession(harness, 1) as session:
        session.fill(0, *batch(1))
        tag = session.post(slot=0, **fields)
        completion = session.completion(0, tag)
        assert (completion["status"], completion["detail"]) == (STATUS[status], detail)
        session.works()
        assert session.stats()["errors"] == 1


def test_a_dtype_wider_than_the_session_is_refused(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1, element_bytes=2) as session:
        tag = session.post(slot=0, dtype=0)
        assert session.completion(0, tag)["status"] == STATUS["BAD_REQUEST"]


@pytest.mark.parametrize("wrong", [-2, EXPERTS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("index", [0, 5, 31])
def test_each_expert_id_is_checked(harness: _core.TestHarness, wrong: int, index: int) -> None:
    with RawSession(harness, 1) as session:
        x, ids, weights = batch(16)
        ids.flat[index] = wrong
        session.fill(0, x, ids, weights)
        tag = session.post(slot=0, num_tokens=16)
        completion = session.completion(0, tag)
        assert (completion["status"], completion["detail"], completion["detail2"]) == (
            STATUS["BAD_EXPERT_ID"],
            wrong,
            index,
        )
        session.works()


def test_a_slot_in_flight_twice_is_refused_and_the_first_completes(harness: _core.TestHarness) -> None:
    with RawSession(harness, 1, num_slots=3) as session:
        session.fill(0, *batch(1))
        harness.hold()
        session.post(slot=0)
        eventually(harness.forwards_running)
        first = session.post(slot=1)
        session.post(slot=1)
        harness.release()
        completion = session.completion(1, first)  # the refusal was written first, the result over it
        assert (completion["tag"], completion["status"]) == (first, STATUS["OK"])
        assert session.stats()["errors"] == 1 and session.stats()["requests"] == 2
        session.works()


@pytest.mark.parametrize(
    "fields", [{"slot": 2}, {"slot": 0xFFFFFFFF}, {"slot": 0, "tag": 0}, {"slot": 0, "tag": 1 << 32}]
)
def test_what_cannot_be_answered_ends_the_session(
    harness: _core.TestHarness, bystander: RawSession, fields: dict[str, int]
) -> None:
    with RawSession(harness, 1) as session:
        session.post(**fields)
        eventually(lambda: session.stats()["poisoned"])
        assert session.stats()["ended"] and session.stats()["errors"] == 1
        assert session.read("header", "closing") == STATUS["BROKEN_QUEUE"]


@pytest.mark.parametrize("left", [0, 4096, 8192, 12288 + 4096])
@pytest.mark.parametrize("when", ["idle", "computing"])
def test_truncated_memory_ends_that_session_alone(
    harness: _core.TestHarness, bystander: RawSession, left: int, when: str
) -> None:
    """Whatever page is gone: header, requests, completions, or what the model reads and writes in a slot."""
    with RawSession(harness, 1, num_slots=1) as session:
        session.works()
        if when == "computing":
            harness.hold()
            session.post(slot=0, num_tokens=3, tag=session.tag + 1)
            eventually(harness.forwards_running)
        os.ftruncate(session.shm_fd, left)
        harness.release()
        if when == "idle" and left > 0:
            session.publish(session.position + 1)  # the same descriptor once more
        os.eventfd_write(session.doorbell_fd, 1)
        eventually(lambda: session.stats()["poisoned"])
        assert session.stats()["ended"] == "the client truncated its shared memory"
        bystander.works()


def test_memory_truncated_over_and_over(harness: _core.TestHarness, bystander: RawSession) -> None:
    for session_id in range(1, 30):
        with RawSession(harness, session_id) as session:
            os.ftruncate(session.shm_fd, 0)
            os.eventfd_write(session.doorbell_fd, 1)
            eventually(lambda s=session: s.stats()["poisoned"])
    bystander.works()


SIGBUS_ELSEWHERE = """
import faulthandler, mmap, os, sys
from syshaxd import _core
order = sys.argv[1]
if order == "before":
    faulthandler.enable()
harness = _core.TestHarness(1, 2, 8, 1)
def session(number):
    layout = harness.layout(1, 1, 4, 1)
    fd = os.memfd_create("x"); os.ftruncate(fd, layout["total_bytes"])
    harness.add_session(number, fd, os.eventfd(0), bytes(16), 1, 1, 4, 1)
session(1)
if order == "after":
    faulthandler.enable()
    session(2)
fd = os.memfd_create("other"); os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096); os.ftruncate(fd, 0)
print("reading", flush=True)
memory[0]
"""


@pytest.mark.parametrize("order", ["never", "before", "after"])
def test_a_sigbus_elsewhere_kills_as_ever(order: str) -> None:
    """Faults outside sessions go to the handler that was there before, whichever came first."""
    done = subprocess.run(
        [sys.executable, "-c", SIGBUS_ELSEWHERE, order], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "reading\n" and done.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in done.stderr) == (order != "never")


def test_a_sent_sigbus_kills_as_ever() -> None:
    text = (
        SIGBUS_ELSEWHERE.split('fd = os.memfd_create("other")')[0]
        + "print('reading', flush=True)\nos.kill(os.getpid(), 7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, "never"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "reading\n" and done.returncode == -signal.SIGBUS


def test_a_session_lies_between_pages_that_nobody_may_touch(harness: _core.TestHarness) -> None:
    """An offset too far, should a check ever fail, meets no neighbour."""
    with RawSession(harness, 77) as session:
        session.works()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        areas = [(*(int(end, 16) for end in words[0].split("-")), words[1]) for words in lines]
        inode = str(os.fstat(session.shm_fd).st_ino)
        guarded = [
            at
            for at, words in enumerate(lines)
            if words[4] == inode
            and areas[at - 1][1:3] == (areas[at][0], "---p")
            and (areas[at][1], "---p") == (areas[at + 1][0], areas[at + 1][2])
        ]
        assert guarded, "the daemon's mapping of this session has no guards on both sides"
