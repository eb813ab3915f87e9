"""Processes that die, stop and fork: kill -9 of either side in every state, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ring_harness import FakeDaemon, batch, descriptors, eventually, reference, shared_memory_of

from syshax import Client, DaemonLostError, InvalidArgumentError, Model, RequestTimeoutError

HARNESS = Path(__file__).parent.parent / "ring_harness.py"


def works(model: Model) -> None:
    x, ids, weights = batch(3)
    got = model.moe(0, x, ids, weights, timeout=10)
    np.testing.assert_array_equal(got.view(np.uint32), reference(0, x, ids, weights).view(np.uint32))


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child that has printed its first line; killed at the end."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


CLIENT = """
import sys, threading
import numpy as np
from syshax import Client
model = Client(sys.argv[1]).open("tiny", num_slots=2)
arrays = np.ones((4, 64), np.float32), np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32)
state = sys.argv[2]
if state == "filling":
    slot = model.acquire()
elif state == "submitted":
    pending = [model.submit(0, *arrays) for _ in range(2)]
elif state == "waiting":
    threading.Thread(target=model.moe, args=(0, *arrays)).start()
elif state == "waiting for a slot":
    pending = [model.submit(0, *arrays) for _ in range(2)]
    threading.Thread(target=model.acquire).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("state", ["idle", "filling", "submitted", "waiting", "waiting for a slot"])
@pytest.mark.parametrize("held", [False, True], ids=["", "held"])
def test_kill_9_of_a_client(daemon: FakeDaemon, client: Client, state: str, held: bool) -> None:
    """Also while its request is being computed: its session's memory goes when the computation has ended."""
    bystander = client.open("tiny")
    works(bystander)
    gc.collect()  # what earlier tests left to the collector
    before = descriptors()
    if held:
        daemon.harness.hold()
    with process("-c", CLIENT, str(daemon.runtime_dir), state) as child:
        if held and state not in ("idle", "filling"):
            eventually(daemon.harness.forwards_running)
        child.send_signal(signal.SIGKILL)
        child.wait()
        time.sleep(0.05)
        daemon.harness.release()
        works(bystander)
        eventually(lambda: daemon.sessions() == 1)
    eventually(lambda: len(descriptors()) == len(before))
    assert not shared_memory_of(daemon.runtime_dir)
    works(bystander)


def test_a_stopped_daemon_is_a_timeout_and_a_continued_one_serves_on(runtime_dir: Path, client: Client) -> None:
    with process(str(HARNESS), str(runtime_dir)) as daemon:
        model = client.open("tiny")
        works(model)
        daemon.send_signal(signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{daemon.pid}/stat").read_text().split(")")[1].split()[0] == "T")
        start = time.monotonic()
        with pytest.raises(RequestTimeoutError):
            model.moe(0, *batch(3), timeout=0.3)
        assert time.monotonic() - start < 2
        daemon.send_signal(signal.SIGCONT)
        for _ in range(5):
            works(model)


@pytest.mark.parametrize("held", [False, True])
def test_kill_9_of_the_daemon(runtime_dir: Path, client: Client, held: bool) -> None:
    with process(str(HARNESS), str(runtime_dir), *(["--hold"] if held else [])) as daemon:
        model = client.open("tiny")
        pending = model.submit(0, *batch(3))
        if not held:
            pending.result(timeout=10)
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
        with pytest.raises(DaemonLostError):
            model.moe(0, *batch(3), timeout=10)
        if held:
            with pytest.raises(DaemonLostError):
                pending.result(timeout=10)
    assert not shared_memory_of(runtime_dir)
    with FakeDaemon(runtime_dir):  # the dead one's socket file is in nobody's way
        model.moe(0, *batch(3), reconnect_s=5)


def test_a_forked_child_cannot_use_the_model_and_does_not_hold_its_lease(daemon: FakeDaemon, client: Client) -> None:
    model = client.open("tiny")
    works(model)
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            model.moe(0, *batch(3))
        except InvalidArgumentError as error:
            os.write(ready_write, str(error).encode())
        model.close()  # its own affair: the parent's session lives on
        time.sleep(30)
        os._exit(0)
    try:
        assert b"before this process forked" in os.read(ready_read, 4096)
        works(model)
        model.close()
        eventually(lambda: daemon.sessions() == 0)  # though the child is alive
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready_read)
        os.close(ready_write)
