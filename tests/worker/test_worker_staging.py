"""The device path, run with torch's CPU device: pieces, slots given back, refusals. A fake ring computes in numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from syshax.errors import InternalError, ShuttingDownError
from syshax.protocol import Dtype
from syshax.ring import Result, Status
from syshax.vllm.staging import Rows, Staging

HIDDEN, TOP_K = 8, 2
CODES = {dtype.ring_code: getattr(torch, dtype.value) for dtype in Dtype}


class FakeSlot:
    """Areas of one slot; its "experts" give x * sum(ids * weights) + layer."""

    def __init__(self, owner: FakeRing) -> None:
        self.owner = owner
        self.areas = [ctypes.create_string_buffer(owner.max_tokens * HIDDEN * 4) for _ in range(4)]
        addresses = [ctypes.addressof(area) for area in self.areas]
        self.hidden_states, self.topk_ids, self.topk_weights, self.output = addresses

    def submit(self, layer: int, num_tokens: int, top_k: int, dtype_code: int) -> None:
        assert self in self.owner.held and 1 <= num_tokens <= self.owner.max_tokens and top_k == TOP_K
        self.owner.requests.append(num_tokens)

        def area(index: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
            count = num_tokens * columns
            return torch.frombuffer(self.areas[index], dtype=dtype, count=count).view(num_tokens, columns)

        dtype = CODES[dtype_code]
        factor = (area(1, TOP_K, torch.int32) * area(2, TOP_K, torch.float32)).sum(1, keepdim=True)
        area(3, HIDDEN, dtype).copy_(area(0, HIDDEN, dtype).float() * factor + layer)

    def wait(self, timeout: float | None) -> Result:
        return Result(status=self.owner.status, detail=3)

    def release(self) -> None:
        self.owner.held.remove(self)
        self.owner.free.append(self)


class FakeRing:
    def __init__(self, max_tokens: int, num_slots: int) -> None:
        self.max_tokens, self.status = max_tokens, int(Status.OK)
        self.requests: list[int] = []
        self.held: list[FakeSlot] = []
        self.free = [FakeSlot(self) for _ in range(num_slots)]

    def acquire(self, timeout: float | None) -> Any:
        assert self.free, "a slot is given back before another is taken"
        self.held.append(self.free.pop())
        return self.held[-1]

    def memory(self) -> tuple[int, int]:
        return 0, 0


def rows(tokens: int, dtype: torch.dtype) -> tuple[Rows, torch.Tensor]:
    """A batch and what FakeSlot makes of it, without the layer."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    ids = torch.randint(0, 9, (tokens, TOP_K), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return Rows(x, ids, weights, torch.zeros_like(x)), x.float() * (ids * weights).sum(1, keepdim=True)


@settings(deadline=None)
@given(
    tokens=st.integers(0, 40), max_tokens=st.integers(1, 16), num_slots=st.integers(1, 3), dtype=st.sampled_from(Dtype)
)
def test_every_row_passes_through_once(tokens: int, max_tokens: int, num_slots: int, dtype: Dtype) -> None:
    ring = FakeRing(max_tokens, num_slots)
    staging = Staging(ring, torch.device("cpu"), num_slots)
    for layer in (0, 5):
        batch, product = rows(tokens, CODES[dtype.ring_code])
        staging.moe(layer, batch, dtype, 1.0)
        assert torch.equal(batch.out, (product + layer).to(batch.out.dtype))
    assert sum(ring.requests) == 2 * tokens
    staging.close()
    assert ring.held == []


@pytest.mark.parametrize(
    ("status", "error"), [(Status.SHUTTING_DOWN, ShuttingDownError), (Status.BAD_LAYER, InternalError)]
)
def test_a_refusal_is_an_error(status: Status, error: type[Exception]) -> None:
    ring = FakeRing(4, 1)
    ring.status = int(status)
    staging = Staging(ring, torch.device("cpu"), 1)
    with pytest.raises(error, match="layer 2"):
        staging.moe(2, rows(3, torch.float32)[0], Dtype.FLOAT32, 1.0)
