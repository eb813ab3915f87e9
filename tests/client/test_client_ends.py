"""Sessions that the daemon ends: each reason with its own error, and only those attach again that may."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from ring_harness import ABI, FakeDaemon, batch, eventually, reference

from syshax import Client, DaemonLostError, Model
from syshax.endings import ending
from syshax.errors import ERRORS, SessionEndedError, SyshaxError
from syshax.protocol import Closing, ErrorAnswer, ErrorBody

FINAL = [Closing.BROKEN_QUEUE, Closing.TRUNCATED, Closing.KICKED]


def header_word(model: Model, name: str) -> ctypes.c_uint32:
    address, _ = model.memory()
    return ctypes.c_uint32.from_address(address + ABI["syshax_ring_header"]["fields"][name][0])


def request(model: Model, reconnect_s: float = 0.0) -> None:
    x, ids, weights = batch(3)
    got = model.moe(0, x, ids, weights, timeout=10, reconnect_s=reconnect_s)
    np.testing.assert_array_equal(got.view(np.uint32), reference(0, x, ids, weights).view(np.uint32))


@pytest.mark.parametrize("code", [*FINAL, 77])
def test_a_session_that_ended_for_good_is_not_attached_again(daemon: FakeDaemon, model: Model, code: int) -> None:
    request(model)
    header_word(model, "closing").value = code
    for _ in range(2):
        with pytest.raises(SessionEndedError) as error:
            request(model, reconnect_s=30)
        assert "syshaxd ended this session: " in str(error.value) and error.value.hint
    assert model.session_id == 1 and daemon.sessions() == 1, "nobody attached again"


@pytest.mark.parametrize("code", FINAL)
def test_who_waits_hears_it_at_once(daemon: FakeDaemon, model: Model, code: Closing) -> None:
    """A request that is out, and a thread that waits for a slot, while the connection is still there."""
    daemon.harness.hold()
    x, ids, weights = batch(2)
    pending = [model.submit(0, x, ids, weights) for _ in range(2)]
    found: list[SyshaxError] = []

    def take() -> None:
        try:
            model.acquire(timeout=20)
        except SyshaxError as error:
            found.append(error)

    waiter = threading.Thread(target=take)
    waiter.start()
    header_word(model, "closing").value = code
    with pytest.raises(SessionEndedError, match="waiting for the result: syshaxd ended this session"):
        pending[0].result(timeout=20)
    waiter.join(20)
    assert isinstance(found[0], SessionEndedError) and "waiting for a free slot: " in found[0].message
    daemon.harness.release()


def test_the_daemons_last_word_says_more_than_the_code(daemon: FakeDaemon, model: Model) -> None:
    error = ending(Closing.KICKED, "ended over the control API by uid 0, pid 7")
    body = ErrorAnswer(error=ErrorBody(code=error.code, message=error.message, hint=error.hint))
    header_word(model, "closing").value = Closing.KICKED
    daemon._connections[1].send(body.model_dump_json().encode())
    daemon.cut()
    for _ in range(3):  # every thread that lost it finds the same word
        with pytest.raises(SessionEndedError, match="ended over the control API by uid 0, pid 7"):
            request(model, reconnect_s=30)


def test_memory_that_says_nothing_leaves_the_last_word(daemon: FakeDaemon, model: Model) -> None:
    """Who truncated its memory sees no code: the daemon's pages are others now."""
    error = ending(Closing.TRUNCATED, "the client truncated its shared memory")
    body = ErrorAnswer(error=ErrorBody(code=error.code, message=error.message, hint=error.hint))
    daemon.harness.hold()
    x, ids, weights = batch(2)
    pending = model.submit(0, x, ids, weights)
    daemon._connections[1].send(body.model_dump_json().encode())
    daemon.cut()
    with pytest.raises(SessionEndedError, match="truncated its shared memory"):
        pending.result(timeout=20)
    daemon.harness.release()


@pytest.mark.parametrize("said", [b"{", b"\xff" * 100, b'{"error": {}}'])
def test_a_last_word_that_makes_no_sense_is_a_lost_daemon(daemon: FakeDaemon, model: Model, said: bytes) -> None:
    daemon.harness.hold()
    x, ids, weights = batch(2)
    pending = model.submit(0, x, ids, weights)
    daemon._connections[1].send(said)
    daemon.cut()
    with pytest.raises(DaemonLostError, match="the connection to syshaxd ended"):
        pending.result(timeout=20)
    daemon.harness.release()


def test_a_client_that_was_stopped_attaches_again(daemon: FakeDaemon, model: Model) -> None:
    header_word(model, "closing").value = Closing.STOPPED
    daemon.cut()
    with pytest.raises(DaemonLostError, match="stopped for too long"):
        request(model)
    request(model, reconnect_s=10)
    assert model.session_id == 2


def test_a_queue_that_the_client_broke_ends_with_its_name(daemon: FakeDaemon, model: Model) -> None:
    """The daemon's own code, met by the client's library while the connection is open."""
    request(model)
    header_word(model, "submit_tail").value += 1000
    eventually(lambda: daemon.harness.session_stats()[0]["poisoned"] or _ring(model))
    assert header_word(model, "closing").value == Closing.BROKEN_QUEUE
    with pytest.raises(SessionEndedError, match="request queue makes no sense"):
        request(model, reconnect_s=30)


def _ring(model: Model) -> None:
    """A doorbell: an idle daemon sleeps."""
    session = model._session
    assert session is not None
    os.eventfd_write(session.ring._descriptors[0], 1)


def test_an_older_daemon_says_only_that_it_closes(runtime_dir: Path) -> None:
    """Minor version 0 wrote 1 for every end: the connection decides."""
    with FakeDaemon(runtime_dir) as daemon, Client(runtime_dir) as client:
        model = client.open("tiny")
        header_word(model, "closing").value = Closing.DRAINING
        request(model)
        daemon.harness.hold()
        x, ids, weights = batch(2)
        pending = model.submit(0, x, ids, weights)
        daemon.cut()
        with pytest.raises(DaemonLostError):
            pending.result(timeout=20)
        daemon.harness.release()


@pytest.mark.parametrize("code", [*Closing, 99])
def test_every_code_has_words_and_an_error_of_the_tree(code: int) -> None:
    plain, detailed = ending(code), ending(code, "pid 7 did it")
    assert type(plain) is type(detailed) and ERRORS[plain.code] is type(plain)
    assert plain.message and plain.hint and "pid 7 did it" in detailed.message
    assert isinstance(plain, SessionEndedError) == (code in FINAL or code == 99)
