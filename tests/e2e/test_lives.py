"""Who dies when: workers and daemon are killed, stopped and started again; nothing leaks and every answer is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from services import Daemon, EngineProcess, WorkerServer, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # several vLLM starts on a busy machine

Checkpoint = Callable[[str], Path]
Reference = Callable[[str], list[list[int]]]
NAME = "mixtral"


@pytest.fixture(scope="module")
def server(daemon: Daemon, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerServer]:
    """Two tensor-parallel ranks behind the worker's own HTTP server."""
    base = tmp_path_factory.mktemp("server")
    made = WorkerServer(base, checkpoint(NAME), daemon.runtime_dir, "--enforce-eager", "-tp", "2")
    try:
        made.wait()
        yield made
    finally:
        if made.process.poll() is None:
            made.kill()


def test_two_ranks(server: WorkerServer, daemon: Daemon, reference: Reference) -> None:
    """Rank 0 submits, the others add nothing: one session, and the sum over ranks is right."""
    assert server.tokens(NAME) == reference(NAME)
    assert daemon.model(NAME).sessions == 1


def test_two_workers_share_the_weights(
    server: WorkerServer, daemon: Daemon, engine: EngineProcess, checkpoint: Checkpoint, reference: Reference
) -> None:
    alone = daemon.status()
    engine.start(checkpoint(NAME), enforce_eager=True)
    both = daemon.status()
    assert (alone.sessions, both.sessions) == (1, 2)
    assert both.pool_bytes == alone.pool_bytes > 0
    answers: list[list[list[int]]] = []
    other = threading.Thread(target=lambda: answers.append(server.tokens(NAME)))
    other.start()
    assert engine.generate(NAME)["tokens"] == reference(NAME)
    other.join()
    assert answers == [reference(NAME)]


def test_a_daemon_killed_within_a_request(engine: EngineProcess, daemon: Daemon, reference: Reference) -> None:
    """The engine of the test before: its tokens are right although the daemon dies between them and comes back."""
    done = daemon.model(NAME).forward_calls
    engine.ask(NAME)
    wait_until(lambda: daemon.model(NAME).forward_calls > done + 8, 60, "the request is under way")
    daemon.kill()
    time.sleep(1.0)
    daemon.start()
    answer = engine.receive()
    assert answer.get("tokens") == reference(NAME), answer
    assert daemon.model(NAME).forward_calls > 0, "the new daemon computed the rest"


def test_the_other_worker_comes_back_too(server: WorkerServer, reference: Reference) -> None:
    assert server.tokens(NAME) == reference(NAME)


def open_files(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield str(link.readlink())


def test_a_killed_worker_leaves_nothing(engine: EngineProcess, daemon: Daemon, server: WorkerServer) -> None:
    before = set(Path("/dev/shm").glob("*syshax*"))
    assert daemon.status().sessions == 2
    engine.process.kill()
    wait_until(lambda: daemon.status().sessions == 1, 5, "the session has ended")
    assert set(Path("/dev/shm").glob("*syshax*")) == before == set()
    assert daemon.process is not None
    held = [name for name in open_files(daemon.process.pid) if "/dev/shm/" in name and "syshax" in name]
    assert len(held) <= 1, "the dead session's memory is closed"
    assert server.tokens(NAME)


def test_a_stopped_server_ends_cleanly(server: WorkerServer, daemon: Daemon) -> None:
    assert server.stop() == 0
    wait_until(lambda: daemon.status().sessions == 0, 5, "the session has ended")
