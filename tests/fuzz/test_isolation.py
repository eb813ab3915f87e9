"""No session sees another's data: not in its new memory, not in the working memory that all sessions share, and not
when both are computed together.

The other session poisons everything it can with NaN: a single byte of it that reached a sum would show.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_daemon import EXAMPLES, RealDaemon, under_attack

from syshax import Client

HIDDEN, EXPERTS, TOKENS = 64, 4, 48


@pytest.fixture(scope="module")
def daemon() -> Iterator[RealDaemon]:
    with under_attack() as daemon:
        yield daemon


def raw_session(daemon: RealDaemon) -> tuple[socket.socket, mmap.mmap]:
    connection = daemon.dial()
    connection.send(json.dumps({"model": "tiny", "max_tokens": TOKENS, "num_slots": 3}).encode())
    answer, received, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    memory = mmap.mmap(received[0], json.loads(answer)["layout"]["total_bytes"])
    for number in received:
        os.close(number)
    return connection, memory


def test_new_memory_is_zero(daemon: RealDaemon) -> None:
    """Also when sessions of the same size have just filled theirs."""
    for _ in range(10):
        connection, memory = raw_session(daemon)
        assert not any(memory[320:]), "the header is all that the daemon has written"
        memory[4096:] = b"\xa5" * (len(memory) - 4096)
        memory.close()
        connection.close()


def batch(seed: int, tokens: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    random = np.random.default_rng(seed)
    ids = random.integers(-1, EXPERTS, (tokens, 2)).astype(np.int32)
    return random.standard_normal((tokens, HIDDEN)).astype(np.float32), ids, random.random((tokens, 2), np.float32)


class Poison(threading.Thread):
    """Another session that sends NaN and infinities, of all sizes, as fast as it is answered."""

    def __init__(self, daemon: RealDaemon) -> None:
        super().__init__(daemon=True)
        self._client = Client(daemon.runtime_dir)
        self._model = self._client.open("tiny", max_tokens=TOKENS)
        self._over = threading.Event()
        self.sent = 0

    def once(self, tokens: int) -> None:
        _, ids, weights = batch(tokens, tokens)
        x = np.full((tokens, HIDDEN), np.nan if tokens % 2 else np.inf, np.float32)
        assert not np.isfinite(self._model.moe(tokens % 2, x, np.maximum(ids, 0), weights)).any()
        self.sent += 1

    def run(self) -> None:
        while not self._over.is_set():
            self.once(self.sent % TOKENS + 1)

    def end(self) -> None:
        self._over.set()
        self.join(20)
        self._client.close()


@pytest.fixture(scope="module")
def alone(daemon: RealDaemon) -> dict[tuple[int, int, int], npt.NDArray[Any]]:
    """Answers from before anybody sent poison."""
    with Client(daemon.runtime_dir) as client:
        model = client.open("tiny", max_tokens=TOKENS)
        return {
            (seed, tokens, layer): model.moe(layer, *batch(seed, tokens)).copy()
            for seed in range(4)
            for tokens in (1, 2, 7, 16, 33, TOKENS)
            for layer in range(2)
        }


def test_after_another_session_every_answer_is_the_same(daemon: RealDaemon, alone: dict[Any, Any]) -> None:
    poison = Poison(daemon)
    with Client(daemon.runtime_dir) as client:
        model = client.open("tiny", max_tokens=TOKENS)
        for (seed, tokens, layer), expected in alone.items():
            poison.once(TOKENS)
            poison.once(tokens)
            np.testing.assert_array_equal(model.moe(layer, *batch(seed, tokens)), expected)
    poison._client.close()


def test_beside_another_session_every_answer_is_the_same(daemon: RealDaemon, alone: dict[Any, Any]) -> None:
    """Both are out at the same time, so that slices alternate and requests of one layer may be computed together."""
    poisons = [Poison(daemon) for _ in range(2)]
    for poison in poisons:
        poison.start()
    with Client(daemon.runtime_dir) as client:
        model = client.open("tiny", max_tokens=TOKENS)
        for _ in range(max(3, EXAMPLES // 20)):
            for (seed, tokens, layer), expected in alone.items():
                np.testing.assert_array_equal(model.moe(layer, *batch(seed, tokens)), expected)
    for poison in poisons:
        poison.end()
        assert poison.sent > 10


@settings(max_examples=EXAMPLES, deadline=None)
@given(tokens=st.integers(1, TOKENS), seed=st.integers(0, 1000))
def test_no_expert_is_nothing_at_all(daemon: RealDaemon, tokens: int, seed: int) -> None:
    """Output rows that no expert adds to are 0, whatever was computed there before."""
    with Client(daemon.runtime_dir) as client:
        model = client.open("tiny", max_tokens=TOKENS)
        x, ids, weights = batch(seed, tokens)
        model.moe(0, np.full_like(x, np.nan), np.maximum(ids, 0), weights)
        assert not model.moe(0, x, np.full_like(ids, -1), weights).any()
