"""Attaching: one connected socket is one session, and its lease.

Owns the exchange on the attach socket (one JSON datagram each way, two descriptors with the answer) and the check that
what the daemon says is what lies in the ring. Knows nothing of arrays.
"""

from __future__ import annotations

import array
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from syshax.errors import DaemonLostError, RequestTimeoutError, SyshaxError, VersionError, error_from_code
from syshax.protocol import (
    ATTACH_MESSAGE_BYTES,
    ATTACH_SOCKET,
    PROTOCOL_VERSION,
    AttachAnswer,
    AttachRequest,
    ErrorAnswer,
    RingLayout,
)
from syshax.ring import Ring, library
from syshax.sockets import connect

_MAX_DESCRIPTORS = 8
"""More than the protocol passes, so that a newer daemon's extra ones are received, and closed."""
_SAME_VERSION = "install the same version of client and daemon"


@dataclass(frozen=True, slots=True)
class Session:
    """An attached session: the daemon's answer and the ring it gave."""

    answer: AttachAnswer
    ring: Ring


def attach(runtime_dir: Path, request: AttachRequest, timeout: float) -> Session:
    """Connects, asks, checks. Raises what the daemon answers, and DaemonAbsentError, NotAllowedError, DaemonLostError,
    RequestTimeoutError, VersionError."""
    path = runtime_dir / ATTACH_SOCKET
    library()  # before anything is asked of the daemon
    connection = connect(path, socket.SOCK_SEQPACKET, timeout)
    descriptors: list[int] = []
    try:
        data, descriptors = _exchange(connection, path, request, timeout)
        answer = _parse(data)
        if len(descriptors) != 2:
            raise VersionError(f"{path}: the answer came with {len(descriptors)} descriptors, not 2", _SAME_VERSION)
        connection.settimeout(None)
        shm_fd, doorbell_fd = descriptors
        descriptors = []  # the ring's from here on, whatever happens
        ring = Ring(shm_fd, doorbell_fd, connection)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        connection.close()
        raise
    _compare(ring, answer)
    return Session(answer, ring)


def _exchange(connection: socket.socket, path: Path, request: AttachRequest, timeout: float) -> tuple[bytes, list[int]]:
    try:
        connection.send(request.model_dump_json().encode())
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = connection.recvmsg(ATTACH_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise RequestTimeoutError(
            f"{path}: syshaxd did not answer the attach within {timeout:g} s", "is the daemon stopped or stuck?"
        ) from None
    except OSError as error:
        raise DaemonLostError(f"{path}: syshaxd ended the connection ({error.strerror})", "see its log") from error
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    received = descriptors.tolist()
    if fault := _fault(data, flags):
        for descriptor in received:
            os.close(descriptor)
        kind_of, what, hint = fault
        raise kind_of(f"{path}: {what}", hint)
    return data, received


def _fault(data: bytes, flags: int) -> tuple[type[SyshaxError], str, str] | None:
    """The error's parts: one that its own traceback's frame holds would be a cycle, and keep whatever it knows."""
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        return VersionError, "the answer is longer than this client expects, or descriptors ran out", _SAME_VERSION
    if not data:
        return DaemonLostError, "syshaxd ended the connection without an answer", "see its log"
    return None


def _parse(data: bytes) -> AttachAnswer:
    """The answer, or the error it carries. The protocol is looked at before the rest is."""
    try:
        error = ErrorAnswer.model_validate_json(data).error
    except ValidationError:
        pass
    else:
        raise error_from_code(error.code, error.message, error.hint)
    try:
        answer = AttachAnswer.model_validate_json(data)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the message"
        raise VersionError(f"the daemon's attach answer: {where}: {first['msg']}", _SAME_VERSION) from None
    if answer.protocol != PROTOCOL_VERSION:
        raise VersionError(
            f"the daemon speaks protocol {answer.protocol}, this client {PROTOCOL_VERSION}", _SAME_VERSION
        )
    return answer


def _compare(ring: Ring, answer: AttachAnswer) -> None:
    """The answer's layout and the ring's header say the same."""
    for field in RingLayout.model_fields:
        said, found = getattr(answer.layout, field), getattr(ring.layout, field)
        if said != found:
            ring.close()
            raise VersionError(f"the daemon says {field} {said}, the ring's header {found}", _SAME_VERSION)
