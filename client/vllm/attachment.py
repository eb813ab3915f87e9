"""This process's attachment to syshaxd: one session, made before weights are read, renewed when the daemon restarts.

Owns the session's life and what a lost daemon means: requests are pure functions, so one that was lost is submitted
again after the daemon is back with the same model, within the configured time. While no request comes, keeping.py does
the same. One attachment a process (tensor-parallel rank 0 of each pipeline stage); layers hold it alive. Computes
nothing: there is no local fallback.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import threading
import time
import weakref
from pathlib import Path

import torch
from vllm.config import VllmConfig

from syshax.client import Client, Model
from syshax.control import Control
from syshax.errors import (
    CheckpointError,
    ConfigError,
    DaemonLostError,
    ModelNotReadyError,
    NotAllowedError,
    RequestTimeoutError,
    SyshaxError,
    UnknownModelError,
)
from syshax.protocol import Dtype, ModelInfo, StatusAnswer
from syshax.vllm import keeping, op
from syshax.vllm.prepare import (
    GONE,
    checkpoint_directory,
    compare_fingerprint,
    compare_geometry,
    find_ready,
    prepare,
)
from syshax.vllm.settings import WorkerSettings, settings_from
from syshax.vllm.staging import Rows, Staging

logger = logging.getLogger("vllm.syshax")

LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
NOT_YET = (*GONE, NotAllowedError, UnknownModelError, ModelNotReadyError, RequestTimeoutError)
"""What a daemon may answer while it comes back and its administrator, or its configuration, loads the model again; a
timeout where the service manager holds its sockets and it takes long."""


class Attachment:
    """A session of `max_tokens` rows of `dtype` with the daemon's model of that checkpoint."""

    def __init__(
        self, path: Path, settings: WorkerSettings, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.path, self.settings, self.max_tokens, self.dtype, self.device = path, settings, max_tokens, dtype, device
        self.key = (path, settings, max_tokens, dtype)
        self._num_slots = 1 if device.type == "cpu" else 2  # on a device the copy back of one overlaps the next
        self._staging: Staging | None = None
        self._client = Client(runtime_dir=settings.runtime_dir)
        self._opening = threading.Lock()
        self._next: Model | None = None
        """A newer session, for the thread that computes to take: what belongs to a device is its alone."""
        self.model = self._begin()
        self._stage()
        weakref.finalize(self, self._client.close)
        keeping.keep(self, self._client.runtime_dir)

    def _begin(self) -> Model:
        """The first session. Where no daemon is there it fails at once; one that restarts while it loads the model is
        waited for."""
        deadline = time.monotonic() + self.settings.load_timeout_s
        Control(self.settings.runtime_dir).get("/v1/status", StatusAnswer)
        while True:
            try:
                return self._open(self._prepare(deadline))
            except GONE as error:
                if time.monotonic() >= deadline:
                    raise
                logger.warning("%s: waiting for it to come back", error.message)
            time.sleep(1)

    def _prepare(self, deadline: float) -> ModelInfo:
        return prepare(Control(self.settings.runtime_dir), self.path, self.settings, logger.info, deadline)

    def _open(self, info: ModelInfo) -> Model:
        return self._client.open(
            info.name,
            max_tokens=self.max_tokens,
            dtype=DTYPES[self.dtype],
            num_slots=self._num_slots,
            priority=self.settings.priority,
            fingerprint=compare_fingerprint(info, self.path),
            address=self.settings.address,
        )

    def _stage(self) -> None:
        if self.device.type != "cpu":
            self._staging = Staging(self.model, self.device, self._num_slots)

    @property
    def newest(self) -> Model:
        """The session that computes, or the one that will."""
        return self._next or self.model

    def renew(self, lost: Model, ask: bool) -> None:
        """Opens another session where `lost` is the newest still, from any thread. ask: for the model, and wait for it;
        else it must be ready. Raises what attaching raises."""
        if ask:
            info = self._prepare(time.monotonic() + self.settings.load_timeout_s)
        else:
            info = find_ready(Control(self.settings.runtime_dir), self.path, self.settings)
        with self._opening:
            if self.newest is lost:
                self._next = self._open(info)

    def layer_index(self, prefix: str, **sizes: int) -> int:
        """The index among the model's MoE layers of vLLM's layer `prefix`. Raises CheckpointError for a layer that
        the daemon does not hold, FingerprintError where `sizes` (fields of Geometry) differ."""
        geometry = self.model.geometry
        found = LAYER_NUMBER.search(prefix)
        number = int(found.group(1)) if found else -1
        if number not in geometry.layer_ids:
            raise CheckpointError(
                f"vLLM's layer {prefix} is not among the layers with experts that syshaxd holds for {self.model.name}: "
                f"{geometry.layer_ids}"
            )
        compare_geometry(geometry, sizes, self.model.name)
        return geometry.layer_ids.index(number)

    def moe(self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The experts' weighted sum for x [num_tokens, hidden_size], any number of tokens; a new tensor like x."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = Rows(x.contiguous(), topk_ids.int().contiguous(), topk_weights.float().contiguous(), out)
        while True:
            if self._next is not None:
                self._take_next()
            try:
                self._submit(layer, rows)
                return out
            except GONE as error:
                self._reattach(error)
            except SyshaxError as error:
                logger.error("syshaxd did not compute layer %d of %s: %s", layer, self.model.name, error)
                raise

    def _submit(self, layer: int, rows: Rows) -> None:
        timeout = self.settings.request_timeout_s
        if self._staging is not None:
            self._staging.moe(layer, rows, DTYPES[self.dtype], timeout)
        else:
            self.model.moe(layer, rows.x, rows.topk_ids, rows.topk_weights, out=rows.out, timeout=timeout)

    def _reattach(self, lost: SyshaxError) -> None:
        """To a daemon that holds the same experts again; raises DaemonLostError after reconnect_s."""
        wait_s = self.settings.reconnect_s
        deadline = time.monotonic() + wait_s
        logger.warning("%s: waiting up to %g s for it to come back", lost.message, wait_s)
        self._close_session()
        if not self._opening.acquire(timeout=wait_s):
            raise self._not_back("it is still being attached to")
        try:
            while self._next is None:
                self._next = self._try_to_open(deadline)
        finally:
            self._opening.release()
        logger.info("attached to syshaxd again, submitting the lost request again")

    def _try_to_open(self, deadline: float) -> Model | None:
        try:
            return self._open(self._prepare(deadline))
        except NOT_YET as error:
            if time.monotonic() >= deadline:
                raise self._not_back(error.message) from None
        except SyshaxError as error:
            logger.error("syshaxd came back, but not for this worker: %s", error)
            raise
        time.sleep(0.2)
        return None

    def _not_back(self, why: str) -> DaemonLostError:
        message = f"syshaxd did not come back with the model within {self.settings.reconnect_s:g} s: {why}"
        logger.error("%s", message)
        return DaemonLostError(message, "SYSHAX_WORKER_RECONNECT_S sets how long a worker waits")

    def _take_next(self) -> None:
        self._close_session()
        taken = self._next
        assert taken is not None
        self.model = taken
        if self._next is taken:
            self._next = None
        self._stage()

    def _close_session(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self.model.close()


_current: weakref.ref[Attachment] | None = None
_directory = functools.lru_cache(maxsize=2)(checkpoint_directory)
"""A repository's name takes a question to its hub, which each layer would ask."""


def attach(config: VllmConfig) -> Attachment:
    """This process's attachment for the model of that configuration, made at the first call.

    Raises what keeps the worker from delegating, after saying it in one line of the log.
    """
    global _current
    model = config.model_config
    try:
        settings = settings_from(
            config.additional_config if isinstance(config.additional_config, dict) else {}, os.environ
        )
        path = _directory(model.model, model.revision, config.load_config.download_dir)
        max_tokens = config.scheduler_config.max_num_batched_tokens
        key = (path, settings, max_tokens, model.dtype)
        existing = _existing()
        if existing is not None and existing.key == key:
            return existing
        if existing is not None:
            existing = None
            gc.collect()  # an engine that was shut down in this process may hang in a cycle; a second for each layer
            existing = _existing()
        if existing is not None:
            raise ConfigError(
                f"this process is attached to syshaxd for {existing.path} already and cannot attach for {path} too",
                "offload one model in a process; a draft model with experts of its own is not supported",
            )
        attachment = Attachment(*key, torch.device(config.device_config.device_type))
    except SyshaxError as error:
        logger.error("syshax: this worker cannot delegate its experts and will not start: %s", error)
        raise
    op.bind(attachment)
    _current = weakref.ref(attachment)
    logger.info(
        "attached to syshaxd (%s) as session %d: model %s in %s, %d layers of %d experts, batches up to %d tokens",
        settings.runtime_dir or "default runtime directory",
        attachment.model.session_id,
        attachment.model.name,
        attachment.model.format,
        attachment.model.geometry.num_layers,
        attachment.model.geometry.num_experts,
        max_tokens,
    )
    return attachment


def _existing() -> Attachment | None:
    return _current() if _current is not None else None
