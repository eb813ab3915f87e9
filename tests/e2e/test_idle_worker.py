"""A worker that is asked nothing finds a restarted daemon: vLLM's attachment without vLLM's engine, real syshaxd.

The attachment is the engine's own, on the CPU device; it is asked for one layer before and after.
"""

from __future__ import annotations

import gc
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from services import Daemon, wait_until

from syshax.errors import DaemonAbsentError, DaemonLostError, SessionEndedError
from syshax.protocol import ATTACH_SOCKET, BOOT_FILE, CONTROL_SOCKET, LoadRequest, ModelInfo, ModelsAnswer

pytestmark = pytest.mark.vllm

TOKENS, HIDDEN = 3, 256
AWAY_S = 2.0
"""Long enough for several of the pauses between which a worker looks."""


class Worker:
    """One attachment, and what its first layer answers."""

    def __init__(self, path: Path, runtime_dir: Path) -> None:
        from syshax.vllm.attachment import Attachment
        from syshax.vllm.settings import WorkerSettings

        settings = WorkerSettings(runtime_dir=str(runtime_dir), reconnect_s=20)
        self.attachment: Attachment | None = Attachment(path, settings, 8, torch.float32, torch.device("cpu"))

    def answer(self) -> torch.Tensor:
        x = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN).sin()
        assert self.attachment is not None
        return self.attachment.moe(0, x, torch.tensor([[0, 3]] * TOKENS), torch.full((TOKENS, 2), 0.5))


@pytest.fixture
def worker(daemon: Daemon, checkpoint: Callable[[str], Path]) -> Iterator[Worker]:
    wait_until(lambda: daemon.status().sessions == 0, 5, "the last test's session has ended")
    made = Worker(checkpoint("mixtral"), daemon.runtime_dir)
    yield made
    made.attachment = None
    gc.collect()


def is_attached(daemon: Daemon) -> bool:
    return daemon.status().sessions == 1


def test_after_a_crash(daemon: Daemon, worker: Worker) -> None:
    before = worker.answer()
    for _ in range(2):
        daemon.kill()
        time.sleep(1)
        daemon.start()
        wait_until(lambda: is_attached(daemon), 20, "the idle worker has attached again")
    assert torch.equal(worker.answer(), before)
    assert daemon.status().sessions == 1, "the request took the session that was there"


def test_a_stopped_daemon_is_not_started_by_it(daemon: Daemon, worker: Worker) -> None:
    """The sockets are held as a service manager holds them, which would start a daemon at the first connection."""
    before = worker.answer()
    daemon.stop()
    assert not (daemon.runtime_dir / BOOT_FILE).exists()
    held = []
    for name, kind in ((CONTROL_SOCKET, socket.SOCK_STREAM), (ATTACH_SOCKET, socket.SOCK_SEQPACKET)):
        held.append(socket.socket(socket.AF_UNIX, kind))
        held[-1].bind(str(daemon.runtime_dir / name))
        held[-1].listen()
    connected, _, _ = select.select(held, [], [], AWAY_S)
    assert not connected, "an idle worker connected to a stopped daemon's socket"
    for listener in held:
        Path(listener.getsockname()).unlink()
        listener.close()
    daemon.start()
    wait_until(lambda: is_attached(daemon), 20, "the idle worker has attached again")
    assert torch.equal(worker.answer(), before)


def test_a_kicked_worker_stays_away(daemon: Daemon, worker: Worker) -> None:
    session = daemon.sessions().sessions[0].session_id
    daemon.control.delete(f"/v1/sessions/{session}")
    time.sleep(AWAY_S)
    assert daemon.status().sessions == 0
    with pytest.raises(SessionEndedError, match="over the control API"):
        worker.answer()


def test_an_unload_is_not_undone(daemon: Daemon, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    from syshax.vllm import keeping

    monkeypatch.setattr(keeping, "_LONGEST_AFTER_REFUSAL_S", 0.5)
    before, info = worker.answer(), daemon.model("mixtral")
    daemon.control.delete("/v1/models/mixtral?force=1")
    time.sleep(AWAY_S)
    assert daemon.control.get("/v1/models", ModelsAnswer).models == []
    daemon.control.post("/v1/models", LoadRequest(name="mixtral", path=info.path), ModelInfo)
    wait_until(lambda: is_attached(daemon), 20, "the idle worker has attached to what an administrator loaded")
    assert torch.equal(worker.answer(), before)


def test_a_daemon_that_restarts_while_it_loads_is_waited_for(
    daemon: Daemon, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from syshax.vllm import attachment

    real, lost = attachment.prepare, [DaemonLostError("syshaxd ended"), DaemonAbsentError("no syshaxd")]
    monkeypatch.setattr(attachment.time, "sleep", lambda seconds: None)

    def prepare(*arguments: Any) -> Any:
        if lost:
            raise lost.pop()
        return real(*arguments)

    monkeypatch.setattr(attachment, "prepare", prepare)
    worker = Worker(checkpoint("mixtral"), daemon.runtime_dir)
    assert not lost and worker.answer() is not None
    with pytest.raises(DaemonAbsentError):
        Worker(checkpoint("mixtral"), daemon.runtime_dir / "none")


def test_an_engine_that_ended_leaves_no_thread(daemon: Daemon, worker: Worker) -> None:
    def threads() -> int:
        return sum(thread.name == "syshax-keeping" for thread in threading.enumerate())

    before = threads()
    worker.attachment = None
    gc.collect()
    wait_until(lambda: threads() < before, 5, "the thread has ended")
    wait_until(lambda: daemon.status().sessions == 0, 5, "the session has ended")


def test_each_further_layer_attaches_at_no_cost(
    daemon: Daemon, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for the attachment once for each layer, of which models have up to a hundred; the checkpoint may be a
    repository's name, whose hub is far away."""
    from syshax.vllm.attachment import attach

    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(checkpoint("mixtral"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="maker/mixtral", revision=None, dtype=torch.float32),
        load_config=SimpleNamespace(download_dir=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        device_config=SimpleNamespace(device_type="cpu"),
        additional_config={"syshax": {"runtime_dir": str(daemon.runtime_dir)}},
    )
    first = attach(config)
    begin = time.monotonic()
    assert all(attach(config) is first for _ in range(200))
    assert time.monotonic() - begin < 2 and asked == ["maker/mixtral"]
    del first
    gc.collect()
