"""A worker holds no expert: its memory after the first answer against plain vLLM's; the daemon holds each once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from services import Daemon, EngineProcess, pss_bytes
from test_quality import ENGINE, MODEL, PLAIN

from syshax.checkpoint import EXPERT_TENSOR, Checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.model]


def memory_after_an_answer(engine: EngineProcess, options: dict[str, Any]) -> int:
    """Bytes (PSS) of a fresh engine after it has answered once in bfloat16."""
    engine.start(MODEL, **ENGINE, **options, dtype="bfloat16")
    answer = engine.call("chat", turns=["What is the capital of France?"], new_tokens=8)
    assert answer.get("tokens"), answer
    return pss_bytes(engine.process.pid)


@pytest.fixture
def engines(daemon: Daemon, tmp_path: Path) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Two that import vLLM at the same time and share its libraries' pages while either is measured."""
    environment = {"SYSHAX_RUNTIME_DIR": str(daemon.runtime_dir)}
    made = (EngineProcess(tmp_path / "plain.log", environment), EngineProcess(tmp_path / "worker.log", environment))
    yield made
    for engine in made:
        engine.end()


@pytest.mark.timeout(900)
def test_a_worker_holds_no_experts(daemon: Daemon, engines: tuple[EngineProcess, EngineProcess]) -> None:
    entries = Checkpoint(MODEL).tensors
    experts = sum(2 * math.prod(entry.shape) for name, entry in entries.items() if EXPERT_TENSOR.search(name))
    plain = memory_after_an_answer(engines[0], PLAIN)
    settings = {"additional_config": {"syshax": {"model": "demo", "format": "bf16"}}}
    worker = memory_after_an_answer(engines[1], settings)
    pool = daemon.status().pool_bytes
    mib = {"plain vLLM": plain, "worker": worker, "experts": experts, "daemon's pool": pool}
    print("\nMiB: " + ", ".join(f"{what} {size >> 20}" for what, size in mib.items()))
    assert plain - worker >= 0.9 * experts
    assert experts <= pool <= 1.05 * experts, "the daemon holds every weight once"
