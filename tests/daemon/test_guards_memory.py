"""What users of other systems ran into with memory and shared memory (tests/GUARDS.md), each against a real daemon
under a service manager; rows that other tests guard are not here."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from service_manager import ServiceManager, private_shm

from syshax import Client, InvalidArgumentError, NoMemoryError
from syshax.protocol import ModelsAnswer, SessionsAnswer, StatusAnswer

SHM = Path("/dev/shm")
REQUEST = (0, np.ones((2, 64), np.float32), np.array([[0, 1], [2, -1]], np.int32), np.ones((2, 2), np.float32))
CLIENT = """
import sys, threading
import numpy as np
from syshax import Client
model = Client(sys.argv[1]).open("m", max_tokens=4096)
arrays = np.ones((4096, 64), np.float32), np.zeros((4096, 2), np.int32), np.ones((4096, 2), np.float32)
threading.Thread(target=lambda: [model.moe(0, *arrays) for _ in range(100000)], daemon=True).start()
print(model.session_id, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def manager(short_dir: Path, tmp_path: Path) -> Iterator[ServiceManager]:
    write_checkpoint(tmp_path / "m")
    config = "[cache]\nenabled = false\n[limits]\nstopped_seconds = 1\n"  # no cache: its writer holds descriptors
    config += f'[models.m]\npath = "{tmp_path / "m"}"\nautoload = true\n'
    with ServiceManager(short_dir, config) as made:
        made.start()
        made.until_ready("m")
        yield made


@contextmanager
def busy_client(manager: ServiceManager) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that sends long requests one after the other, and its session's number."""
    command = [sys.executable, "-c", CLIENT, str(manager.runtime_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, int(child.stdout.readline())
        finally:
            child.kill()


def eventually(check: Callable[[], bool], seconds: float = 5) -> float:
    begun = time.monotonic()
    while not check():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - begun


def sessions(manager: ServiceManager) -> list[int]:
    return [info.session_id for info in manager.control.get("/v1/sessions", SessionsAnswer).sessions]


def at_rest(manager: ServiceManager) -> tuple[int, int]:
    """What the daemon holds once the control connections that were just closed are gone from it too."""
    before, now = (-1, -1), held(manager)
    while now != before:
        time.sleep(0.3)
        before, now = now, held(manager)
    return now


def held(manager: ServiceManager) -> tuple[int, int]:
    """Descriptors of the daemon, and mappings of sessions' memory."""
    assert manager.process is not None
    root = Path(f"/proc/{manager.process.pid}")
    return len(list((root / "fd").iterdir())), (root / "maps").read_text().count("/syshax-")


def test_nothing_is_named_in_dev_shm_while_running_nor_after_kill_9_of_either_side(manager: ServiceManager) -> None:
    before = set(SHM.iterdir())
    base = at_rest(manager)
    with busy_client(manager) as (child, _):
        assert held(manager)[1] == 1 and set(SHM.iterdir()) == before
        child.kill()
        eventually(lambda: held(manager) == base)
    with busy_client(manager):
        manager.end(signal.SIGKILL)
        assert set(SHM.iterdir()) == before
    manager.start()
    eventually(lambda: held(manager)[1] == 0)
    assert set(SHM.iterdir()) == before


def test_a_64_mib_dev_shm_is_an_error_with_numbers_never_sigbus(short_dir: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    config = f'[models.m]\npath = "{tmp_path / "m"}"\nautoload = true\n'
    with ServiceManager(short_dir, config, private_shm(64 << 20)) as manager, Client(manager.runtime_dir) as client:
        manager.start()
        manager.until_ready("m")
        with client.open("m") as model:
            expected = model.moe(*REQUEST)
        words = r"MiB of shared memory, /dev/shm has .*MiB of 64 MiB free.*--shm-size"
        opened = []
        with pytest.raises(NoMemoryError, match=words):
            while len(opened) < 8:
                opened.append(client.open("m", max_tokens=16384, num_slots=2))
        assert len(opened) == 3, "each takes 16 MiB and a little"
        for model in opened:
            np.testing.assert_array_equal(model.moe(*REQUEST), expected)
            model.close()
        eventually(lambda: sessions(manager) == [])
        client.open("m", max_tokens=32768).close()
        assert manager.process is not None and manager.process.poll() is None


def test_a_stopped_workers_lease_ends_an_idle_ones_stays_and_others_do_not_wait(manager: ServiceManager) -> None:
    with Client(manager.runtime_dir) as client, busy_client(manager) as (child, stopped):
        idle, other = client.open("m"), client.open("m")
        begun = time.monotonic()
        child.send_signal(signal.SIGSTOP)
        took = []
        while stopped in sessions(manager):
            assert time.monotonic() - begun < 10
            start = time.perf_counter()
            other.moe(*REQUEST, timeout=5)
            took.append(time.perf_counter() - start)
        assert time.monotonic() - begun > 1, "the limit is 1 s"
        assert len(took) > 10 and statistics.median(took) < 0.1
        time.sleep(max(0, begun + 4 - time.monotonic()))  # the caretaker looks every 2 s
        assert sessions(manager) == [idle.session_id, other.session_id]
        idle.moe(*REQUEST, timeout=5)
        child.send_signal(signal.SIGCONT)


def test_a_restart_is_noticed_by_its_boot_id_and_clients_attach_again_within_2_s(manager: ServiceManager) -> None:
    def boots() -> set[str]:
        get: Any = manager.control.get
        routes = {"/v1/status": StatusAnswer, "/v1/models": ModelsAnswer, "/v1/sessions": SessionsAnswer}
        return {get(route, answer).boot_id for route, answer in routes.items()}

    with Client(manager.runtime_dir) as client:
        model = client.open("m")
        first = model.boot_id
        expected = model.moe(*REQUEST)
        assert boots() == {first}
        answered: list[float] = []

        def wait_over_it() -> None:
            np.testing.assert_array_equal(model.moe(*REQUEST, reconnect_s=60), expected)
            answered.append(time.monotonic())

        manager.end(signal.SIGKILL)
        waiting = threading.Thread(target=wait_over_it)
        waiting.start()
        manager.start()
        waiting.join(60)
        assert answered[0] - manager.ready_at < 2
        assert boots() == {model.boot_id} != {first}


def test_detaching_with_work_in_flight_ends_it_cleanly_and_frees_its_memory(manager: ServiceManager) -> None:
    base = at_rest(manager)
    arrays = np.ones((4096, 64), np.float32), np.zeros((4096, 2), np.int32), np.ones((4096, 2), np.float32)
    with Client(manager.runtime_dir) as client:
        for _ in range(5):
            model = client.open("m", max_tokens=4096, num_slots=8)
            pending = [model.submit(0, *arrays) for _ in range(8)]
            model.close()
            for request in pending:
                with pytest.raises(InvalidArgumentError, match="is closed"):
                    request.result(timeout=5)
        eventually(lambda: held(manager) == base)
        np.testing.assert_array_equal(client.open("m").moe(*REQUEST), client.open("m").moe(*REQUEST))
    assert "Traceback" not in manager.log()


def test_the_pool_shrinks_with_the_layers_that_others_compute(manager: ServiceManager, tmp_path: Path) -> None:
    """Layers without routed experts are the worker's: their weights take no byte here, nor do shared experts'."""
    write_checkpoint(tmp_path / "four", num_hidden_layers=4)
    write_checkpoint(tmp_path / "two", num_hidden_layers=4, mlp_only_layers=[0, 2])
    four, two = (manager.load(name, tmp_path / name, "q8_0") for name in ("four", "two"))
    pools = [sum(info.node_bytes.values()) for info in (four, two)]
    assert pools[0] == 2 * pools[1] > 0
    status = manager.control.get("/v1/status", StatusAnswer)
    infos = manager.control.get("/v1/models", ModelsAnswer).models
    assert status.pool_bytes == sum(sum(info.node_bytes.values()) for info in infos)
    manager.control.delete("/v1/models/four")
    eventually(lambda: "four" not in manager.models())
    after = manager.control.get("/v1/status", StatusAnswer)
    assert after.pool_bytes == status.pool_bytes - pools[0]
