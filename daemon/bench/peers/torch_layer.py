"""What peers that are PyTorch operators share: their libraries, random weights, and inputs as tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from syshaxd import _core
from syshaxd.bench.peers import PeerAbsentError


def import_torch(threads: int) -> Any:
    """torch with this many threads. Raises PeerAbsentError where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise PeerAbsentError("torch is not installed")
    torch = importlib.import_module("torch")
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    return torch


def load_vllm_operators(torch: Any) -> Any:
    """vLLM's CPU operators, without vLLM itself: the build that vLLM would choose on this CPU."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise PeerAbsentError("vLLM is not installed")
    features = _core.cpu_features()
    name = "_C_AVX2"
    if "avx512" in features:
        name = "_C" if "avx512bf16" in features else "_C_AVX512"
    folder = Path(spec.submodule_search_locations[0])
    library = folder / f"{name}.abi3.so"
    if not library.exists():
        library = folder / "_C.abi3.so"
    if not library.exists():
        raise PeerAbsentError(f"the installed vLLM has no CPU operators ({library.name})")
    torch.ops.load_library(str(library))
    return torch.ops._C


def operator(operators: Any, name: str) -> Any:
    """Raises PeerAbsentError where the library has no such operator."""
    found = getattr(operators, name, None)
    if found is None:
        raise PeerAbsentError(f"this build has no operator {name}")
    return found


class TorchLayer:
    """A layer that is one call on tensors: run_layer(output, hidden_states, topk_weights, topk_ids)."""

    def __init__(self, torch: Any, top_k: int, run_layer: Callable[[Any, Any, Any, Any], None]) -> None:
        self._torch, self._top_k, self._run_layer = torch, top_k, run_layer

    def prepare(self, hidden_states: npt.NDArray[Any]) -> None:
        torch = self._torch
        self._input = torch.from_numpy(hidden_states).to(torch.bfloat16)
        self._output = torch.empty_like(self._input)
        self._weights = torch.full((len(hidden_states), self._top_k), 1 / self._top_k)

    def run(self, topk_ids: npt.NDArray[Any]) -> None:
        self._run_layer(self._output, self._input, self._weights, self._torch.from_numpy(topk_ids))


def random_bf16(torch: Any, *sizes: int) -> Any:
    return torch.randn(*sizes, dtype=torch.bfloat16) * 0.02


def random_int8(torch: Any, *sizes: int) -> Any:
    return torch.randint(-127, 127, sizes, dtype=torch.int8)
