"""The ring's C library through ctypes: slots, submissions and waits of one session.

Owns the handle of `libsyshax_client.so` and the descriptors it polls; turns its error codes into the error tree. Knows
bytes, addresses and statuses; what a status means for a caller's arrays is said in `syshax.client`.

Lifetime: whoever uses a Ring (a call, a Slot) holds a reference to it; the memory is unmapped and the descriptors are
closed when the last one is gone. `shutdown` ends the lease and wakes every waiter at once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

from pydantic import ValidationError

from syshax.endings import ending
from syshax.errors import (
    InternalError,
    InvalidArgumentError,
    RequestTimeoutError,
    SyshaxError,
    VersionError,
    error_from_code,
)
from syshax.protocol import ATTACH_MESSAGE_BYTES, ErrorAnswer

LIBRARY_VARIABLE = "SYSHAX_CLIENT_LIBRARY"
_ABI = 1
_FOREVER = (1 << 64) - 1


class Status(IntEnum):
    """syshax_ring_status: how the daemon answered a request."""

    OK = 0
    BAD_REQUEST = 1
    BAD_LAYER = 2
    BAD_SHAPE = 3
    BAD_EXPERT_ID = 4
    MODEL_GONE = 5
    SHUTTING_DOWN = 6
    INTERNAL = 7


class _Code(IntEnum):
    """syshax_client_error: how a call of the library ended."""

    OK = 0
    TIMEOUT = -1
    DAEMON_LOST = -2
    BAD_ARGUMENT = -3
    BAD_RING = -4
    SYSTEM = -5
    FORKED = -6
    ENDED = -7


class Result(ctypes.Structure):
    """syshax_client_result: a completion; times in nanoseconds."""

    status: int
    detail: int
    detail2: int
    queued_ns: int
    compute_ns: int
    wait_ns: int
    _fields_ = [
        ("status", c_uint32),
        ("detail", c_int32),
        ("detail2", c_uint32),
        ("reserved", c_uint32),
        ("queued_ns", c_uint64),
        ("compute_ns", c_uint64),
        ("wait_ns", c_uint64),
    ]


class Layout(ctypes.Structure):
    """syshax_client_layout: the ring's header as the library read it."""

    version_major: int
    version_minor: int
    num_slots: int
    max_tokens: int
    hidden_size: int
    top_k: int
    element_bytes: int
    num_layers: int
    spin_us: int
    session_id: int
    total_bytes: int
    _fields_ = [
        ("version_major", c_uint16),
        ("version_minor", c_uint16),
        ("num_slots", c_uint32),
        ("max_tokens", c_uint32),
        ("hidden_size", c_uint32),
        ("top_k", c_uint32),
        ("element_bytes", c_uint32),
        ("num_layers", c_uint32),
        ("spin_us", c_uint32),
        ("session_id", c_uint64),
        ("total_bytes", c_uint64),
        ("boot_id", c_uint8 * 16),
    ]


_SIGNATURES: dict[str, tuple[object, Sequence[object]]] = {
    "abi": (c_uint32, []),
    "error_name": (c_char_p, [c_int]),
    "open": (c_int, [c_int, c_int, c_int, POINTER(c_void_p)]),
    "shutdown": (None, [c_void_p]),
    "close": (None, [c_void_p]),
    "get_layout": (None, [c_void_p, POINTER(Layout)]),
    "closing": (c_uint32, [c_void_p]),
    "base": (c_void_p, [c_void_p, POINTER(c_uint64)]),
    "acquire": (c_int, [c_void_p, c_uint64, POINTER(c_uint32)]),
    "hidden_states": (c_void_p, [c_void_p, c_uint32]),
    "topk_ids": (c_void_p, [c_void_p, c_uint32]),
    "topk_weights": (c_void_p, [c_void_p, c_uint32]),
    "output": (c_void_p, [c_void_p, c_uint32]),
    "submit": (c_int, [c_void_p, c_uint32, c_uint32, c_uint32, c_uint32, c_uint32, POINTER(c_uint64)]),
    "wait": (c_int, [c_void_p, c_uint32, c_uint64, c_uint64, POINTER(Result)]),
    "release": (None, [c_void_p, c_uint32]),
    "moe": (c_int, [c_void_p, *[c_uint32] * 4, *[c_void_p] * 4, c_uint64, POINTER(Result)]),
}


class _Library:
    """The functions of libsyshax_client.so without their prefix."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(os.fspath(path), use_errno=True)
        except OSError as error:
            raise InternalError(
                f"the ring's client library cannot be loaded: {error}",
                f"install syshax with its compiled parts, or name the file in ${LIBRARY_VARIABLE}",
            ) from None
        try:
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, f"syshax_client_{name}")
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
            abi = library.syshax_client_abi()
        except AttributeError as error:
            raise VersionError(f"{path} is not the client library of this version: {error}") from None
        if abi != _ABI:
            raise VersionError(f"{path} has ABI {abi}, this version of syshax needs {_ABI}")

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # for type checkers: all are set above
        raise AttributeError(name)


@functools.cache
def library() -> _Library:
    """The library beside this file, or the one that $SYSHAX_CLIENT_LIBRARY names; loaded once."""
    return _Library(Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).with_name("libsyshax_client.so")))


def _nanoseconds(timeout: float | None) -> int:
    if timeout is None or timeout > 1e9:
        return _FOREVER
    return max(0, int(timeout * 1e9))


def _error(code: int, doing: str, timeout: float | None = None) -> SyshaxError:
    if code == _Code.TIMEOUT:
        after = "" if timeout is None else f" within {timeout:g} s"
        return RequestTimeoutError(f"{doing}: no answer{after}", "is syshaxd stopped, or busy with other sessions?")
    if code == _Code.FORKED:
        return InvalidArgumentError(f"{doing}: the model was opened before this process forked", "open it in the child")
    if code == _Code.BAD_RING:
        return VersionError(f"{doing}: the daemon's ring is not one that this client knows")
    if code == _Code.SYSTEM:
        return InternalError(f"{doing}: {os.strerror(ctypes.get_errno())}")
    return InternalError(f"{doing}: {library().error_name(code).decode()}")


def _dispose(handle: c_void_p, descriptors: list[int]) -> None:
    library().close(handle)
    while descriptors:
        with suppress(OSError):
            os.close(descriptors.pop())


class Ring:
    """One session's shared memory. Thread-safe. Takes over both descriptors and the connection."""

    def __init__(self, shm_fd: int, doorbell_fd: int, connection: socket.socket) -> None:
        self._connection = connection
        self._library = library()
        self._handle = c_void_p()
        code = self._library.open(shm_fd, doorbell_fd, connection.fileno(), byref(self._handle))
        os.close(shm_fd)
        if code != 0:
            os.close(doorbell_fd)
            connection.close()
            raise _error(code, "opening the ring")
        self._descriptors = [doorbell_fd]
        self._finalizer = weakref.finalize(self, _dispose, self._handle, self._descriptors)
        self.layout = Layout()
        self._library.get_layout(self._handle, byref(self.layout))
        _rings.add(self)

    def _error(self, code: int, doing: str, timeout: float | None = None) -> SyshaxError:
        """A call's error; of a session that is over, the daemon's last word about it, else what the header says."""
        if code not in (_Code.DAEMON_LOST, _Code.ENDED):
            return _error(code, doing, timeout)
        error = self._last_word() or ending(self._library.closing(self._handle))
        return type(error)(f"{doing}: {error.message}", error.hint)

    def _last_word(self) -> SyshaxError | None:
        """Left in the socket for the other threads that lost the session too."""
        try:
            data = self._connection.recv(ATTACH_MESSAGE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            said = ErrorAnswer.model_validate_json(data).error
        except (OSError, ValidationError):
            return None
        return error_from_code(said.code, said.message, said.hint)

    def wait_ended(self) -> int:
        """Blocks until this session is over, from whichever side; gives the code of protocol.Closing."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        poll.poll()
        closing: int = self._library.closing(self._handle)
        return closing

    def shutdown(self) -> None:
        """Ends the lease; calls that wait in other threads raise DaemonLostError."""
        self._library.shutdown(self._handle)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """shutdown, unmap and close at once: for a ring that nobody else uses."""
        self.shutdown()
        self._finalizer()
        self._connection.close()

    def memory(self) -> tuple[int, int]:
        """(address, bytes) of the whole mapping, for page-locking."""
        size = c_uint64()
        return self._library.base(self._handle, byref(size)), size.value

    def moe(
        self,
        layer: int,
        num_tokens: int,
        top_k: int,
        dtype_code: int,
        hidden_states: int,
        topk_ids: int,
        topk_weights: int,
        output: int,
        timeout: float | None,
    ) -> Result:
        """One request from and to the given addresses (contiguous rows); raises unless the daemon answered."""
        result = Result()
        code = self._library.moe(
            self._handle,
            layer,
            num_tokens,
            top_k,
            dtype_code,
            hidden_states,
            topk_ids,
            topk_weights,
            output,
            _nanoseconds(timeout),
            byref(result),
        )
        if code != 0:
            raise self._error(code, f"layer {layer}", timeout)
        return result

    def acquire(self, timeout: float | None) -> Slot:
        """A free slot, waiting for one."""
        index = c_uint32()
        code = self._library.acquire(self._handle, _nanoseconds(timeout), byref(index))
        if code != 0:
            raise self._error(code, "waiting for a free slot", timeout)
        return Slot(self, index.value)

    def _leave_in_child(self) -> None:
        """A forked child must not keep the lease alive: it drops its copies of the descriptors."""
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ring in list(_rings):
        ring._leave_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Slot:
    """One slot of a ring, held until release(): fill its areas, submit, wait, read the output.

    For one thread at a time. The addresses are page-aligned and stay the same for the session's life; rows lie
    contiguous from the front of each area. Dropped while its request is out, it comes back when the daemon answers.
    """

    def __init__(self, ring: Ring, index: int) -> None:
        self._ring = ring
        self.index = index
        self._tag = c_uint64()
        self._held = True
        functions, handle = ring._library, ring._handle
        self.hidden_states: int = functions.hidden_states(handle, index)
        self.topk_ids: int = functions.topk_ids(handle, index)
        self.topk_weights: int = functions.topk_weights(handle, index)
        self.output: int = functions.output(handle, index)

    def submit(self, layer: int, num_tokens: int, top_k: int, dtype_code: int) -> None:
        ring = self._ring
        code = ring._library.submit(ring._handle, self.index, layer, num_tokens, top_k, dtype_code, byref(self._tag))
        if code != 0:
            raise ring._error(code, f"submitting layer {layer}")

    def wait(self, timeout: float | None) -> Result:
        """The completion of what was submitted; after RequestTimeoutError it may be waited for again."""
        ring = self._ring
        result = Result()
        code = ring._library.wait(ring._handle, self.index, self._tag, _nanoseconds(timeout), byref(result))
        if code != 0:
            raise ring._error(code, "waiting for the result", timeout)
        return result

    def release(self) -> None:
        if self._held:
            self._held = False
            self._ring._library.release(self._ring._handle, self.index)

    def __del__(self) -> None:
        if getattr(self, "_held", False):
            self.release()
