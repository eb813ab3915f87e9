"""vLLM with its experts in syshaxd gives transformers' greedy tokens, token for token, in float32."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from services import Daemon, EngineProcess, pss_bytes

from syshax.checkpoint import EXPERT_TENSOR, Checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # several vLLM starts on a busy machine

CheckpointMaker = Callable[[str], Path]
Reference = Callable[[str], list[list[int]]]
SERVING_BYTES = 400 << 20
"""KV cache, ring and what Python and torch allocate at the first start."""


def float32_bytes(path: Path) -> tuple[int, int]:
    """What the routed experts' and all other weights take in float32."""
    sizes = {name: 4 * math.prod(entry.shape) for name, entry in Checkpoint(path).tensors.items()}
    experts = sum(size for name, size in sizes.items() if EXPERT_TENSOR.search(name))
    return experts, sum(sizes.values()) - experts


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_30b_a3b"])
def test_eager(
    name: str, daemon: Daemon, engine: EngineProcess, checkpoint: CheckpointMaker, reference: Reference
) -> None:
    """Each model in turn: asked for by the worker, every forward pass computed by the daemon and only there."""
    expected = reference(name)
    base = pss_bytes(engine.process.pid)
    engine.start(checkpoint(name), enforce_eager=True)
    try:
        before = daemon.model(name).forward_calls
        answer = engine.generate(name)
        assert answer["tokens"] == expected
        model = daemon.model(name)
        assert model.geometry is not None and answer["passes"] > 0
        assert model.forward_calls - before == model.geometry.num_layers * answer["passes"]
        assert model.sessions == 1
        experts, others = float32_bytes(checkpoint(name))
        grown = pss_bytes(engine.process.pid) - base
        assert grown < others + 0.1 * experts + SERVING_BYTES, "no expert's weights are in the worker"
    finally:
        engine.call("stop")
    assert daemon.model(name).sessions == 0, "a stopped engine has left"


def test_the_engine_refuses_another_checkpoint(engine: EngineProcess, checkpoint: CheckpointMaker) -> None:
    """qwen3_moe's checkpoint, told to use the daemon's mixtral."""
    options = {"model": str(checkpoint("qwen3_moe")), "additional_config": {"syshax": {"model": "mixtral"}}}
    answer = engine.call("start", options=options)
    assert answer["error"] == "FingerprintError", answer
    assert "mixtral" in answer["message"]


def test_the_engine_refuses_a_typing_error(engine: EngineProcess, checkpoint: CheckpointMaker) -> None:
    options = {"model": str(checkpoint("mixtral")), "additional_config": {"syshax": {"modle": "mixtral"}}}
    answer = engine.call("start", options=options)
    assert "did you mean model?" in answer["message"], answer


def test_the_load_format_alone_is_refused(engine: EngineProcess, checkpoint: CheckpointMaker) -> None:
    """Without the quantization nobody would compute the experts."""
    answer = engine.call("start", options={"model": str(checkpoint("mixtral")), "quantization": None})
    assert "--quantization syshax" in answer["message"], answer


def test_compiled(daemon: Daemon, checkpoint: CheckpointMaker, reference: Reference, tmp_path: Path) -> None:
    """Through torch.compile; the compiler's warm-up calls the operator with the largest batch."""
    expected = reference("qwen3_moe")
    empty = tmp_path / "vllm"
    empty.mkdir()
    known = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache/vllm")) / "modelinfos"
    (empty / "modelinfos").symlink_to(known)  # what vLLM knows of its model classes takes half a minute to make again
    environment = {
        "SYSHAX_RUNTIME_DIR": str(daemon.runtime_dir),
        "VLLM_CACHE_ROOT": str(empty),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    engine = EngineProcess(tmp_path / "log", environment)
    try:
        engine.start(checkpoint("qwen3_moe"))
        assert engine.generate("qwen3_moe")["tokens"] == expected
    finally:
        engine.end()
