"""The way of accelerator tensors through the session's slots: device -> slot -> daemon -> slot -> device.

Copies go straight between the device's memory and the slot's page-aligned areas, ordered on the device's current
stream: what was queued before the layer is done before its input is copied, what is queued after it sees its result.
The host waits once, for the input to have arrived; the copy back is only queued, and the slot is given back when it
is done. Page-locked where the device can (page_lock), else the copies go through the driver's own buffers.

Written against torch's device-generic interface. This project's machines have no accelerator: on one it has NOT been
run; the tests run it with torch's CPU device, whose streams and events do nothing.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from syshax.errors import InternalError, NoMemoryError, ShuttingDownError
from syshax.protocol import Dtype
from syshax.ring import Result, Slot, Status
from syshax.vllm.page_lock import PageLock, page_lock_for

logger = logging.getLogger("vllm.syshax")


class SlotSource(Protocol):
    """What staging needs of syshax.client.Model."""

    @property
    def max_tokens(self) -> int: ...
    def acquire(self, timeout: float | None) -> Slot: ...
    def memory(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Rows:
    """One piece of a batch: inputs and output on the device, rows contiguous."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor


class Staging:
    """For one session and one device; one call at a time, from the thread whose current stream counts."""

    def __init__(self, model: SlotSource, device: torch.device, num_slots: int) -> None:
        self._model = model
        self._num_slots = num_slots
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._draining: deque[tuple[Slot, Any]] = deque()
        self._lock = self._page_lock()

    def _page_lock(self) -> PageLock | None:
        try:
            return page_lock_for(self._device, *self._model.memory())
        except NoMemoryError as error:
            logger.warning("copies between %s and syshaxd will be slower: %s", self._device, error)
            return None

    def moe(self, layer: int, rows: Rows, dtype: Dtype, timeout: float) -> None:
        """Computes `rows.out`; the caller's stream sees it. `timeout` seconds for each piece of max_tokens rows."""
        step = self._model.max_tokens
        for first in range(0, rows.x.shape[0], step):
            part = slice(first, first + step)
            self._piece(
                layer,
                Rows(rows.x[part], rows.topk_ids[part], rows.topk_weights[part], rows.out[part]),
                dtype,
                timeout,
            )

    def _piece(self, layer: int, rows: Rows, dtype: Dtype, timeout: float) -> None:
        slot = self._free_slot(timeout)
        stream = self._streams.current_stream(self._device)
        for address, tensor in (
            (slot.hidden_states, rows.x),
            (slot.topk_ids, rows.topk_ids),
            (slot.topk_weights, rows.topk_weights),
        ):
            host_view(address, tensor).copy_(tensor, non_blocking=True)
        self._event(stream).synchronize()
        slot.submit(layer, rows.x.shape[0], rows.topk_ids.shape[1], dtype.ring_code)
        check(slot.wait(timeout), layer)
        rows.out.copy_(host_view(slot.output, rows.out), non_blocking=True)
        self._draining.append((slot, self._event(stream)))

    def _event(self, stream: Any) -> Any:
        event = self._streams.Event()
        event.record(stream)
        return event

    def _free_slot(self, timeout: float) -> Slot:
        """A slot whose last result has left for the device; waits for the oldest copy when all are on their way."""
        while self._draining and (len(self._draining) >= self._num_slots or self._draining[0][1].query()):
            self._give_back()
        return self._model.acquire(timeout)

    def _give_back(self) -> None:
        slot, copied = self._draining.popleft()
        copied.synchronize()
        slot.release()

    def close(self) -> None:
        """After the last copies: slots back, memory unlocked. Before the session's memory goes away."""
        while self._draining:
            self._give_back()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def host_view(address: int, like: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the shape and dtype of `like` over memory at `address`; the caller keeps it mapped."""
    size = like.numel() * like.element_size()
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def check(result: Result, layer: int) -> None:
    """Raises ShuttingDownError while the daemon drains, InternalError for a refusal: ids and shapes come from vLLM."""
    if result.status == Status.SHUTTING_DOWN:
        raise ShuttingDownError(f"layer {layer}: syshaxd is shutting down")
    if result.status != Status.OK:
        raise InternalError(
            f"layer {layer}: syshaxd answered {Status(result.status).name.lower()} ({result.detail}, {result.detail2})",
            "the daemon's log says more",
        )
