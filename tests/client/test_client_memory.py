"""A lost session's memory goes with the last call that used it, not when the interpreter looks for cycles.

An error that some frame of its own traceback holds is a cycle, and so is everything that it was raised while handling:
one such error kept whole sessions mapped in clients that attach again for years. Here the collector is off.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ring_harness import FakeDaemon, batch

from syshax import Client, Model
from syshax.errors import ModelNotReadyError, SyshaxError
from syshax.protocol import ATTACH_SOCKET, AttachAnswer, ErrorAnswer, ErrorBody
from syshax.ring import _rings

Answer = Callable[[socket.socket, AttachAnswer], None]
NOT_YET = ModelNotReadyError("tiny is loading")


def die(connection: socket.socket, good: AttachAnswer) -> None:
    """As kill -9 ends a daemon that has read the request."""


def refuse(connection: socket.socket, good: AttachAnswer) -> None:
    body = ErrorBody(code=NOT_YET.code, message=NOT_YET.message, hint="")
    connection.send(ErrorAnswer(error=body).model_dump_json().encode())


def say_nonsense(connection: socket.socket, good: AttachAnswer) -> None:
    connection.send(b"{")


def send_more_than_fits(connection: socket.socket, good: AttachAnswer) -> None:
    connection.send(b"{" + b" " * 70_000)


def give_an_empty_ring(connection: socket.socket, good: AttachAnswer) -> None:
    memory, doorbell = os.memfd_create("empty"), os.eventfd(0)
    socket.send_fds(connection, [good.model_dump_json().encode()], [memory, doorbell])
    os.close(memory)
    os.close(doorbell)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def serve(listener: socket.socket, answer: Answer, good: AttachAnswer, times: int) -> None:
    listener.settimeout(1)  # a client that gives up comes less often
    for _ in range(times):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        with connection:
            connection.recv(65536)
            with suppress(BrokenPipeError):
                answer(connection, good)
    listener.close()


def lose_and_ask(model: Model, daemon: FakeDaemon, answer: Answer, then: bool) -> None:
    """The daemon dies in a request; what takes its place answers three attaches so, and then serves, or nobody does."""
    daemon.close()
    path = daemon.runtime_dir / ATTACH_SOCKET
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    served: list[FakeDaemon] = []
    good = model._answer

    def run() -> None:
        serve(listener, answer, good, 3)
        path.unlink()
        if then:
            served.append(FakeDaemon(daemon.runtime_dir))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        model.moe(0, *batch(3), timeout=10, reconnect_s=5 if then else 0.2)
    except SyshaxError as error:
        assert not then or error.code == "version", error
    finally:
        thread.join(10)
        for new in served:
            new.close()


@pytest.mark.parametrize("then", [True, False], ids=["served in the end", "given up"])
@pytest.mark.parametrize("answer", [die, refuse, say_nonsense, send_more_than_fits, give_an_empty_ring])
def test_whatever_the_daemon_answers_meanwhile(
    runtime_dir: Path, client: Client, answer: Answer, then: bool, no_collector: None
) -> None:
    before = set(_rings)
    daemon = FakeDaemon(runtime_dir)
    model = client.open("tiny")
    lost = model._attached().ring
    held = [ring for ring in _rings if ring not in before]
    assert held == [lost]
    del lost, held
    lose_and_ask(model, daemon, answer, then)
    left = [ring for ring in _rings if ring not in before]
    assert all(ring is model._attached().ring for ring in left), "a lost session is still mapped"
    assert len(left) <= 1
