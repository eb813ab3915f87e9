"""A real daemon that is restarted and killed, as the front-end sees it: whose experts are attached."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_checkpoint
from conftest import eventually
from service_manager import ServiceManager

from syshax import Client
from syshaxd.frontend import daemon_view
from syshaxd.frontend.daemon_view import DaemonView, Experts

URL = "http://127.0.0.1:8001"


@pytest.fixture
def manager(short_dir: Path) -> Iterator[ServiceManager]:
    with ServiceManager(short_dir) as made:
        yield made


class Worker(threading.Thread):
    """A session that asks all the time and attaches again, as a vLLM worker's does."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(daemon=True)
        self.client = Client(runtime_dir)
        self.model = self.client.open("m", max_tokens=8, wait=20, address="http://0.0.0.0:8001")
        self.over = threading.Event()

    def run(self) -> None:
        x, ids = np.ones((1, 64), np.float32), np.zeros((1, 2), np.int32)
        while not self.over.wait(0.02):
            self.model.moe(0, x, ids, np.ones((1, 2), np.float32), timeout=60, reconnect_s=60)


async def test_a_restart_is_waited_for_and_an_absence_is_told(
    manager: ServiceManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_view, "POLL_SECONDS", 0.05)
    write_checkpoint(tmp_path / "m")
    manager.configure(f'[models.m]\npath = "{tmp_path / "m"}"\nautoload = true\n')
    await asyncio.to_thread(manager.start)
    await asyncio.to_thread(manager.until_ready, "m")
    worker = await asyncio.to_thread(Worker, manager.runtime_dir)
    worker.start()
    view, experts = DaemonView(str(manager.runtime_dir / "view.sock")), Experts(URL)
    watching = asyncio.create_task(view.watch(lambda: experts.look(view)))
    await eventually(lambda: experts.state == "attached", "its session")
    await asyncio.to_thread(manager.restart)  # the store keeps its model
    await eventually(lambda: experts.state == "attached" and view.sessions, "the session after a restart")
    await asyncio.to_thread(manager.end, signal.SIGKILL)
    await eventually(lambda: bool(experts.reason), "the loss of a killed daemon")
    assert experts.reason == "its experts are not attached: syshaxd cannot be asked (connection refused)"
    await asyncio.to_thread(manager.start)
    await eventually(lambda: not experts.reason and experts.state == "attached", "the next daemon")
    watching.cancel()
    worker.over.set()
    await asyncio.to_thread(worker.join)
    await asyncio.to_thread(worker.client.close)
    await view.close()
