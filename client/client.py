"""`Client` and `Model`: what other engines, tests and the vLLM plugin call.

Owns the public interface: opening models, cutting batches, waiting for a daemon that restarts, and the words in which a
refused request is told. The ring, the attach exchange and the arrays' libraries are the neighbours' matters.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pydantic import ValidationError

from syshax.arrays import Array, Batch, Output, bad_expert_id, batch, output_like
from syshax.errors import (
    DaemonAbsentError,
    DaemonLostError,
    InternalError,
    InvalidArgumentError,
    ModelNotReadyError,
    NotAllowedError,
    RequestTimeoutError,
    ShuttingDownError,
    SyshaxError,
    UnknownModelError,
)
from syshax.protocol import AttachAnswer, AttachRequest, Closing, Dtype, Geometry, Priority, WeightFormat
from syshax.ring import Result, Slot, Status
from syshax.session import Session, attach
from syshax.sockets import runtime_directory

DEFAULT_TIMEOUT = 300.0
"""Seconds that a call waits when it is not told otherwise; a stopped daemon must not hang its clients for ever."""
ATTACH_TIMEOUT = 10.0
_BACKOFF_FIRST, _BACKOFF_MOST = 0.01, 0.25
_COMING_UP = (DaemonAbsentError, DaemonLostError, ModelNotReadyError, RequestTimeoutError, ShuttingDownError)
"""What a client may meet while a daemon starts, or is killed while it answers."""
_COMING_BACK = (*_COMING_UP, UnknownModelError, NotAllowedError)
"""What a client may meet while a daemon restarts: no socket, one without its group yet, models not yet found again."""


class Client:
    """A daemon, by its runtime directory (default: $SYSHAX_RUNTIME_DIR, else /run/syshax). Connects on open()."""

    def __init__(self, runtime_dir: str | os.PathLike[str] | None = None) -> None:
        self.runtime_dir: Path = runtime_directory(runtime_dir)
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()

    def open(
        self,
        name: str,
        *,
        max_tokens: int = 512,
        dtype: Dtype | str = Dtype.FLOAT32,
        num_slots: int = 2,
        top_k: int | None = None,
        priority: Priority | str = Priority.NORMAL,
        fingerprint: str | None = None,
        address: str = "",
        wait: float = 0.0,
    ) -> Model:
        """Attaches to a model that the daemon holds.

        max_tokens: tokens of one request (larger batches are cut); dtype: the widest that will be used; num_slots:
        requests that may be out at once; top_k: the largest that will be used (default: the model's); fingerprint: of
        the caller's own checkpoint, compared by the daemon; address: where the caller answers HTTP, for others to see;
        wait: seconds to wait for the daemon to come up and for
        the model to be ready.

        Raises DaemonAbsentError, NotAllowedError, UnknownModelError, ModelNotReadyError, FingerprintError, LimitError,
        NoMemoryError, VersionError, InvalidArgumentError.
        """
        try:
            request = AttachRequest(
                model=name,
                client=f"{Path(sys.argv[0]).name or 'python'}"[:200],
                max_tokens=max_tokens,
                top_k=top_k,
                dtype=Dtype(dtype),
                num_slots=num_slots,
                priority=Priority(priority),
                fingerprint=fingerprint,
                cpus=sorted(os.sched_getaffinity(0)),
                address=address,
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidArgumentError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from None
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        session = _attach_within(self.runtime_dir, request, wait, _COMING_UP)
        model = Model(self.runtime_dir, request, session)
        self._models.add(model)
        return model

    def close(self) -> None:
        """Closes every model that was opened here."""
        for model in list(self._models):
            model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Model:
    """An attached model. Thread-safe; as many requests run at once as there are slots, others wait for one."""

    def __init__(self, runtime_dir: Path, request: AttachRequest, session: Session) -> None:
        self._runtime_dir = runtime_dir
        self._request_sent = request
        self._session: Session | None = session
        self._answer = session.answer
        self._reattaching = threading.Lock()
        self._swap = threading.Lock()  # around changes of _session alone

    @property
    def name(self) -> str:
        return self._answer.model

    @property
    def geometry(self) -> Geometry:
        return self._answer.geometry

    @property
    def format(self) -> WeightFormat:
        return self._answer.format

    @property
    def fingerprint(self) -> str:
        return self._answer.fingerprint

    @property
    def boot_id(self) -> str:
        """The daemon's; another one after a restart."""
        return self._answer.boot_id

    @property
    def session_id(self) -> int:
        return self._answer.session_id

    @property
    def max_tokens(self) -> int:
        return self._answer.layout.max_tokens

    @property
    def top_k(self) -> int:
        """The largest top_k that a request of this session may use."""
        return self._answer.layout.top_k

    @property
    def closed(self) -> bool:
        return self._session is None

    def moe(
        self,
        layer: int,
        hidden_states: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        out: Array | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        reconnect_s: float = 0.0,
    ) -> Array:
        """The routed experts' output of one layer: [num_tokens, hidden_size], of hidden_states' library and dtype.

        layer: counts MoE layers from 0. hidden_states: [num_tokens, hidden_size], numpy float32 or float16, torch
        float32, bfloat16 or float16 on the CPU. topk_ids: [num_tokens, top_k], any integers; -1 means no expert.
        topk_weights: [num_tokens, top_k] floats, used as float32. out: takes the result. timeout: seconds for all of
        it (None: no limit). reconnect_s: how long to wait for a daemon that went away to come back; the request is
        then sent again, which is safe because it is a pure function.

        Raises InvalidArgumentError, RequestTimeoutError, DaemonLostError, ShuttingDownError, ModelNotReadyError (the
        model was unloaded), and what attaching raises.
        """
        call = self._call(layer, hidden_states, topk_ids, topk_weights, out, timeout)
        step = self.max_tokens
        for first in range(0, call.input.num_tokens, step):
            self._piece(call, first, min(step, call.input.num_tokens - first), reconnect_s)
        return call.output.finish()

    def _call(
        self,
        layer: int,
        hidden_states: Array,
        topk_ids: Array,
        topk_weights: Array,
        out: Array | None,
        timeout: float | None,
    ) -> _Call:
        geometry = self.geometry
        checked = batch(hidden_states, topk_ids, topk_weights, geometry.hidden_size, geometry.num_experts)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        return _Call(layer, checked, output_like(hidden_states, out), timeout, deadline)

    def _piece(self, call: _Call, first: int, tokens: int, reconnect_s: float) -> None:
        """Tokens [first, first + tokens), again and again while a daemon that went away may come back."""
        back_by: float | None = None  # set when the daemon is first missed
        while True:
            session = self._attached()
            try:
                return self._request(session, call, first, tokens)
            except (DaemonLostError, ShuttingDownError) as error:
                if self._session is None:
                    raise self._closed_error() from None
                now = time.monotonic()
                back_by = back_by or min(now + reconnect_s, call.deadline)
                if now >= back_by:
                    raise
                lost = type(error), error.message, error.hint
            # Out of the handler: errors met from here on would keep this one, and its frames the lost session.
            self._reattach(session, back_by, *lost)

    def _request(self, session: Session, call: _Call, first: int, tokens: int) -> None:
        self._check(call, tokens)
        areas = call.input
        try:
            answer = session.ring.moe(
                call.layer,
                tokens,
                areas.top_k,
                areas.dtype.ring_code,
                areas.hidden_states.row(first),
                areas.topk_ids.row(first),
                areas.topk_weights.row(first),
                call.output.rows.row(first),
                call.deadline - time.monotonic(),
            )
        except RequestTimeoutError as error:
            raise RequestTimeoutError(
                f"layer {call.layer} of {self.name}: no result within {call.timeout:g} s", error.hint
            ) from None
        if answer.status != Status.OK:
            raise _refusal(answer, session.answer, call, first)

    def submit(
        self,
        layer: int,
        hidden_states: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        out: Array | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Pending:
        """Starts what moe() does and returns at once; at most max_tokens tokens. timeout: for a slot to be free.

        The input is copied before this returns. As many requests as there are slots may be pending.
        """
        call = self._call(layer, hidden_states, topk_ids, topk_weights, out, timeout)
        areas = call.input
        if areas.num_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"submit() of {areas.num_tokens} tokens, the session's max_tokens is {self.max_tokens}",
                "use moe(), which cuts batches, or open the model with a larger max_tokens",
            )
        self._check(call, areas.num_tokens)
        session = self._attached()
        if areas.num_tokens == 0:
            return Pending(self, session, None, call)
        slot = session.ring.acquire(timeout)
        ctypes.memmove(
            slot.hidden_states, areas.hidden_states.address, areas.num_tokens * areas.hidden_states.row_bytes
        )
        ctypes.memmove(slot.topk_ids, areas.topk_ids.address, areas.num_tokens * areas.topk_ids.row_bytes)
        ctypes.memmove(slot.topk_weights, areas.topk_weights.address, areas.num_tokens * areas.topk_weights.row_bytes)
        slot.submit(layer, areas.num_tokens, areas.top_k, areas.dtype.ring_code)
        return Pending(self, session, slot, call)

    def acquire(self, timeout: float | None = DEFAULT_TIMEOUT) -> Slot:
        """A slot of the ring itself, for callers that copy to and from its addresses (accelerators). Checks nothing."""
        return self._attached().ring.acquire(timeout)

    def memory(self) -> tuple[int, int]:
        """(address, bytes) of the session's mapping, for page-locking; valid until close() or a re-attach."""
        return self._attached().ring.memory()

    def wait_ended(self) -> int:
        """Blocks until this session is over; gives the code of protocol.Closing. For a thread that looks after it: any
        number may wait, and a request finds out by itself."""
        session = self._session
        return Closing.OPEN if session is None else session.ring.wait_ended()

    def close(self) -> None:
        """Detaches. Calls that wait in other threads end with an error; safe to call twice."""
        with self._swap:
            session, self._session = self._session, None
        if session is not None:
            session.ring.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attached(self) -> Session:
        session = self._session
        if session is None:
            raise self._closed_error()
        return session

    def _closed_error(self) -> InvalidArgumentError:
        return InvalidArgumentError(f"model {self.name} is closed", "open it again")

    def _check(self, call: _Call, tokens: int) -> None:
        """What the ring could not even carry; the daemon checks everything again."""
        layout, layers = self._answer.layout, self.geometry.num_layers
        top_k, dtype = call.input.top_k, call.input.dtype
        if not 0 <= call.layer < layers:
            raise InvalidArgumentError(f"layer {call.layer} of {self.name}: it has MoE layers 0 to {layers - 1}")
        if tokens and not 1 <= top_k <= layout.top_k:
            raise InvalidArgumentError(
                f"topk_ids has top_k {top_k}, the session allows 1 to {layout.top_k}",
                f"open the model with top_k={top_k}" if top_k else "",
            )
        if dtype.bytes > layout.element_bytes:
            raise InvalidArgumentError(
                f"hidden_states is {dtype}, the session was opened for {self._request_sent.dtype}",
                f'open the model with dtype="{dtype}"',
            )

    def _reattach(self, lost: Session, back_by: float, kind: type[SyshaxError], message: str, hint: str) -> None:
        """Attaches by name and fingerprint, once for all threads that lost the same session, of which `kind` told."""
        seconds = max(0.0, back_by - time.monotonic())
        if not self._reattaching.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise kind(message, hint)
        try:
            if self._session is not lost:
                return
            lost.ring.shutdown()
            request = self._request_sent.model_copy(update={"fingerprint": self._answer.fingerprint})
            try:
                session = _attach_within(self._runtime_dir, request, back_by - time.monotonic(), _COMING_BACK)
            except _COMING_BACK as last:
                raise DaemonLostError(
                    f"syshaxd went away and did not serve {self.name} again within {seconds:.2g} s: {last.message}",
                    last.hint,
                ) from last
            with self._swap:
                closed = self._session is None
                if not closed:
                    self._session, self._answer = session, session.answer
            if closed:
                session.ring.shutdown()
        finally:
            self._reattaching.release()


class _Call(NamedTuple):
    """One call's checked input, where its output goes and until when."""

    layer: int
    input: Batch
    output: Output
    timeout: float | None
    deadline: float


class Pending:
    """A submitted request. Dropping it gives its slot back when the daemon has answered."""

    def __init__(self, model: Model, session: Session, slot: Slot | None, call: _Call) -> None:
        self._model, self._answer, self._slot, self._call = model, session.answer, slot, call
        self._lock = threading.Lock()
        self._error: SyshaxError | None = None

    def result(self, timeout: float | None = DEFAULT_TIMEOUT) -> Array:
        """The output, as of moe(). After RequestTimeoutError it may be asked again; other errors stay."""
        with self._lock:
            if self._slot is not None:
                self._wait(self._slot, timeout)
            if self._error is not None:
                raise type(self._error)(self._error.message, self._error.hint)
            return self._call.output.target

    def _wait(self, slot: Slot, timeout: float | None) -> None:
        try:
            answer = slot.wait(timeout)
            if answer.status != Status.OK:
                raise _refusal(answer, self._answer, self._call, 0)
            rows = self._call.output.rows
            ctypes.memmove(rows.address, slot.output, self._call.input.num_tokens * rows.row_bytes)
            self._call.output.finish()
        except RequestTimeoutError:
            raise
        except SyshaxError as error:
            kept = self._model._closed_error() if self._model.closed else error
            self._error = type(kept)(kept.message, kept.hint)  # without a traceback, whose frames would hold the ring
        self._slot = None
        slot.release()


def _attach_within(
    runtime_dir: Path, request: AttachRequest, seconds: float, again: tuple[type[SyshaxError], ...]
) -> Session:
    """Attaches, trying again after the errors of `again` until the time is up; then the last one is raised."""
    deadline = time.monotonic() + seconds
    pause = _BACKOFF_FIRST
    while True:
        left = deadline - time.monotonic()
        try:
            return attach(
                runtime_dir, request, ATTACH_TIMEOUT if seconds <= 0 else min(ATTACH_TIMEOUT, max(left, 0.05))
            )
        except again:
            if deadline - time.monotonic() <= pause:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _BACKOFF_MOST)


def _refusal(answer: Result, session: AttachAnswer, call: _Call, first: int) -> SyshaxError:
    """The daemon's status in words; `first` is the piece's first token."""
    where = f"layer {call.layer} of {session.model}"
    geometry = session.geometry
    if answer.status == Status.BAD_EXPERT_ID:
        token, k = divmod(answer.detail2, call.input.top_k)
        return bad_expert_id(answer.detail, first + token, k, geometry.num_experts)
    if answer.status == Status.BAD_LAYER:
        return InvalidArgumentError(f"{where}: it has MoE layers 0 to {geometry.num_layers - 1}")
    if answer.status == Status.BAD_SHAPE:
        return InvalidArgumentError(
            f"{where}: {answer.detail} is out of range: up to {session.layout.max_tokens} tokens, "
            f"top_k up to {session.layout.top_k}"
        )
    if answer.status == Status.BAD_REQUEST:
        return InvalidArgumentError(f"{where}: syshaxd refused the request's slot, dtype or flags")
    if answer.status == Status.MODEL_GONE:
        return ModelNotReadyError(f"{session.model} was unloaded", "load it again, then open it again")
    if answer.status == Status.SHUTTING_DOWN:
        return ShuttingDownError(f"{where}: syshaxd is shutting down", "open the model again when it is back")
    return InternalError(f"{where}: syshaxd answered with status {answer.status}", "see its log")
