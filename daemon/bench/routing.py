"""Which experts the tokens of a bench choose: seeded, distinct within a token, new in every call.

One token at a time passes through all experts of all layers before any comes again, so that no weight is still in a
cache from its last use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Routing:
    """An endless sequence of (layer, topk_ids [tokens, top_k])."""

    def __init__(self, layers: int, experts: int, top_k: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._layers, self._experts, self._top_k = layers, experts, top_k
        self._calls = 0
        self._left: list[list[int]] = [[] for _ in range(layers)]
        """For each layer: experts that have not had their turn."""

    def next(self, tokens: int) -> tuple[int, npt.NDArray[np.int32]]:
        layer = self._calls % self._layers
        self._calls += 1
        rows = [self._cycle(layer)] if tokens == 1 else [self._draw() for _ in range(tokens)]
        return layer, np.array(rows, np.int32)

    def _draw(self) -> npt.NDArray[Any]:
        return self._rng.permutation(self._experts)[: self._top_k]

    def _cycle(self, layer: int) -> list[int]:
        chosen, self._left[layer] = self._left[layer][: self._top_k], self._left[layer][self._top_k :]
        if len(chosen) < self._top_k:
            order = [int(expert) for expert in self._rng.permutation(self._experts)]
            fresh = [expert for expert in order if expert not in chosen][: self._top_k - len(chosen)]
            self._left[layer] = [expert for expert in order if expert not in fresh]
            chosen += fresh
        return chosen
