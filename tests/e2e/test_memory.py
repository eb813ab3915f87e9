"""A worker holds no expert: its memory after the first answer against plain vLLM's; the daemon holds each once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from services import Daemon, EngineProcess, pss_bytes
from test_quality import ENGINE, MODEL, PLAIN

from syshax.checkpoint import EXPERT_TENSOR, Checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.model]


def memory_after_an_answer(log: Path, daemon: Daemon, options: dict[str, Any]) -> int:
    """Bytes (PSS) of a fresh engine after it has answered once in bfloat16."""
    engine = EngineProcess(log, {"SYSHAX_RUNTIME_DIR": str(daemon.runtime_dir)})
    try:
        engine.start(MODEL, **ENGINE, **options, dtype="bfloat16")
        answer = engine.call("chat", turns=["What is the capital of France?"], new_tokens=8)
        assert answer.get("tokens"), answer
        return pss_bytes(engine.process.pid)
    finally:
        engine.end()


@pytest.mark.timeout(900)
def test_a_worker_holds_no_experts(daemon: Daemon, tmp_path: Path) -> None:
    entries = Checkpoint(MODEL).tensors
    experts = sum(2 * math.prod(entry.shape) for name, entry in entries.items() if EXPERT_TENSOR.search(name))
    plain = memory_after_an_answer(tmp_path / "plain.log", daemon, PLAIN)
    settings = {"additional_config": {"syshax": {"model": "demo", "format": "bf16"}}}
    worker = memory_after_an_answer(tmp_path / "worker.log", daemon, settings)
    pool = daemon.status().pool_bytes
    mib = {"plain vLLM": plain, "worker": worker, "experts": experts, "daemon's pool": pool}
    print("\nMiB: " + ", ".join(f"{what} {size >> 20}" for what, size in mib.items()))
    assert plain - worker >= 0.9 * experts
    assert experts <= pool <= 1.05 * experts, "the daemon holds every weight once"
