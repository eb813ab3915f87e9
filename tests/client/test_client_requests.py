"""Requests in time: pending results, threads, timeouts, a daemon that goes, drains, or comes back."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ring_harness import FakeDaemon, batch, descriptors, eventually, reference

from syshax import (
    Client,
    DaemonLostError,
    FingerprintError,
    InvalidArgumentError,
    Model,
    ModelNotReadyError,
    RequestTimeoutError,
    ShuttingDownError,
)


def check(model: Model, seed: int = 0, tokens: int = 5, **options: Any) -> None:
    x, ids, weights = batch(tokens, seed=seed)
    layer = seed % 4
    expected = reference(layer, x, ids, weights)
    np.testing.assert_array_equal(
        model.moe(layer, x, ids, weights, **options).view(np.uint32), expected.view(np.uint32)
    )


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException | None]]:
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            ended.append(None)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_submit_returns_at_once_and_results_come_in_any_order(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", num_slots=3)
    daemon.harness.hold()
    inputs = [batch(4, seed=seed) for seed in range(3)]
    pending = [model.submit(1, *arrays) for arrays in inputs]
    for arrays in inputs:
        arrays[0][:] = 0  # the input was copied
    daemon.harness.release()
    for seed in (2, 0, 1):
        x, ids, weights = batch(4, seed=seed)
        got = pending[seed].result(timeout=5)
        np.testing.assert_array_equal(got.view(np.uint32), reference(1, x, ids, weights).view(np.uint32))
        assert pending[seed].result() is got


def test_submit_waits_for_a_slot_and_says_so(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", num_slots=1)
    daemon.harness.hold()
    pending = model.submit(0, *batch(1))
    with pytest.raises(RequestTimeoutError, match="slot"):
        model.submit(0, *batch(1), timeout=0.1)
    with pytest.raises(RequestTimeoutError):
        pending.result(timeout=0.05)
    daemon.harness.release()
    assert pending.result(timeout=5).shape == (1, 64)
    check(model)


def test_submit_of_nothing_and_of_too_much(model: Model) -> None:
    assert model.submit(0, *batch(0)).result().shape == (0, 64)
    with pytest.raises(InvalidArgumentError, match="max_tokens is 16"):
        model.submit(0, *batch(17))


def test_a_dropped_pending_gives_its_slot_back(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", num_slots=2)
    for seed in range(6):
        model.submit(0, *batch(3, seed=seed))
        gc.collect()
    check(model, timeout=5)


def test_bad_ids_of_a_pending_request(model: Model) -> None:
    x, ids, weights = batch(3)
    ids[2, 0] = 99
    pending = model.submit(0, x, ids, weights)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"topk_ids\[2, 0\] is 99"):
            pending.result()
    check(model)


def test_many_threads(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", num_slots=3, max_tokens=8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: check(model, seed, tokens=seed % 20), range(200)))
    stats = daemon.harness.session_stats()[0]
    assert stats["in_flight"] == 0 and stats["errors"] == 0


def test_a_timeout_says_so_and_its_slot_is_not_reused_too_early(daemon: FakeDaemon, client: Client) -> None:
    """The daemon still writes into the slot; whoever asks next waits for that to end."""
    model = client.open("tiny", num_slots=1)
    daemon.harness.hold()
    start = time.monotonic()
    with pytest.raises(RequestTimeoutError, match=r"layer 2 of tiny: no result within 0.2 s"):
        check(model, seed=2, timeout=0.2)
    assert 0.15 < time.monotonic() - start < 1.5
    with pytest.raises(RequestTimeoutError):
        check(model, timeout=0.1)
    assert daemon.harness.session_stats()[0]["in_flight"] == 1
    daemon.harness.release()
    for seed in range(10):
        check(model, seed, timeout=5)
    assert daemon.harness.forward_calls() == 11


def test_daemon_lost_while_waiting(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", num_slots=1)
    daemon.harness.hold()
    waiting, ended = in_thread(lambda: check(model))
    queued, also_ended = in_thread(lambda: check(model))
    eventually(daemon.harness.forwards_running)
    daemon.cut()
    waiting.join(2)
    queued.join(2)
    assert isinstance(ended[0], DaemonLostError) and isinstance(also_ended[0], DaemonLostError)
    daemon.harness.release()
    with pytest.raises(DaemonLostError):
        check(model)


def test_closing_wakes_those_who_wait(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny", num_slots=1)
    daemon.harness.hold()
    waiting, ended = in_thread(lambda: check(model, reconnect_s=30))
    eventually(daemon.harness.forwards_running)
    pending_slot, also_ended = in_thread(lambda: model.submit(0, *batch(1)))
    model.close()
    model.close()
    waiting.join(2)
    pending_slot.join(2)
    assert isinstance(ended[0], InvalidArgumentError) and "closed" in str(ended[0])
    assert isinstance(also_ended[0], DaemonLostError | InvalidArgumentError)
    daemon.harness.release()
    with pytest.raises(InvalidArgumentError, match="model tiny is closed"):
        check(model)
    eventually(lambda: daemon.sessions() == 0)


def test_draining_and_unloading_have_their_own_errors(daemon: FakeDaemon, client: Client) -> None:
    model, other = client.open("tiny"), client.open("tiny")
    daemon.harness.hold()
    accepted = model.submit(0, *batch(1))
    eventually(daemon.harness.forwards_running)
    drained, ended = in_thread(lambda: daemon.harness.drain(5))
    late, late_ended = in_thread(lambda: check(other))
    time.sleep(0.05)
    daemon.harness.release()
    drained.join(5)
    late.join(5)
    assert accepted.result().shape == (1, 64)  # what was accepted is computed
    assert ended == [None] and isinstance(late_ended[0], ShuttingDownError)
    with pytest.raises(ShuttingDownError):
        check(model)


def test_drain_gives_up_in_time(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny")
    daemon.harness.hold()
    pending = model.submit(0, *batch(1))
    eventually(daemon.harness.forwards_running)
    drained, ended = in_thread(lambda: daemon.harness.stats())
    drained.join(2)
    assert ended == [None]
    time.sleep(0.05)
    assert daemon.harness.stats()["heartbeat_age_ns"] > 1e7  # the watchdog sees a data plane that does not turn
    daemon.harness.release()
    pending.result(5)


def test_an_unloaded_model(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny")
    check(model)
    daemon.harness.forget_model()
    assert not daemon.harness.model_alive()
    with pytest.raises(ModelNotReadyError, match="tiny was unloaded"):
        check(model)


def restart_after(daemon: FakeDaemon, seconds: float, **changes: Any) -> tuple[threading.Thread, list[FakeDaemon]]:
    """Ends the daemon now and starts another one later."""
    new: list[FakeDaemon] = []
    daemon.close()

    def run() -> None:
        time.sleep(seconds)
        new.append(FakeDaemon(daemon.runtime_dir, **changes))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, new


def test_a_restart_inside_a_request_is_waited_for(runtime_dir: Path, client: Client) -> None:
    daemon = FakeDaemon(runtime_dir)
    model = client.open("tiny", max_tokens=4)
    before = model.boot_id
    daemon.harness.hold()
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(check, model, seed, 10, reconnect_s=10) for seed in range(6)]
        eventually(daemon.harness.forwards_running)
        thread, new = restart_after(daemon, 0.3)
        for call in calls:
            call.result(timeout=10)
        thread.join()
    assert model.boot_id == new[0].boot_id != before
    assert new[0].sessions() == 1  # all threads came back by one session
    new[0].close()


def test_a_drained_daemon_is_waited_for_too(runtime_dir: Path, client: Client) -> None:
    daemon = FakeDaemon(runtime_dir)
    model = client.open("tiny")
    daemon.harness.drain(1)
    thread, new = restart_after(daemon, 0.1)
    check(model, reconnect_s=5)
    thread.join()
    new[0].close()


def test_waiting_for_a_daemon_has_a_deadline(runtime_dir: Path, client: Client) -> None:
    daemon = FakeDaemon(runtime_dir)
    model = client.open("tiny")
    daemon.close()
    start = time.monotonic()
    with pytest.raises(DaemonLostError, match=r"did not serve tiny again within 0.5 s: no syshaxd at"):
        check(model, reconnect_s=0.5)
    assert 0.2 < time.monotonic() - start < 1.5
    start = time.monotonic()
    with pytest.raises((DaemonLostError, RequestTimeoutError)):  # the request's own deadline comes first
        check(model, reconnect_s=30, timeout=0.3)
    assert time.monotonic() - start < 1.5
    with FakeDaemon(runtime_dir):
        check(model, reconnect_s=5)  # the model heals when the daemon is back


def test_a_daemon_that_comes_back_with_another_checkpoint_is_refused(runtime_dir: Path, client: Client) -> None:
    daemon = FakeDaemon(runtime_dir)
    model = client.open("tiny")
    thread, new = restart_after(daemon, 0.05, fingerprint="0" * 64)
    with pytest.raises(FingerprintError):
        check(model, reconnect_s=5)
    thread.join()
    new[0].close()


def test_nothing_leaks_over_many_sessions(daemon: FakeDaemon, client: Client) -> None:
    check(client.open("tiny"))
    client.close()
    eventually(lambda: daemon.sessions() == 0 and not daemon._connections)
    gc.collect()  # what earlier tests left to the collector
    before, maps = descriptors(), Path("/proc/self/maps").read_text().count(daemon.runtime_dir.name)
    for seed in range(20):
        model = client.open("tiny", num_slots=1 + seed % 4)
        check(model, seed)
        if seed % 2:
            model.close()
        del model
    gc.collect()
    client.close()
    eventually(lambda: daemon.sessions() == 0 and not daemon._connections)
    eventually(lambda: len(descriptors()) == len(before))
    assert Path("/proc/self/maps").read_text().count(daemon.runtime_dir.name) == maps == 0
