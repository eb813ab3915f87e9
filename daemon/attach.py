"""What passes over the attach socket before a lease begins: the request, its memory, a refusal.

Owns the reading of a hostile datagram, the reservation of a session's shared memory and the form of errors. The life of
a session is sessions.py's.
"""

from __future__ import annotations

import errno
import json
import os
import secrets

import posix_ipc
from pydantic import ValidationError

from syshax.errors import InvalidArgumentError, NoMemoryError, SyshaxError, VersionError
from syshax.protocol import ATTACH_MESSAGE_BYTES, PROTOCOL_VERSION, AttachRequest, ErrorAnswer, ErrorBody
from syshaxd.machine import meminfo, shm_free_bytes
from syshaxd.quantities import human_size


def parse_request(data: bytes) -> AttachRequest:
    """Checks a datagram. Raises InvalidArgumentError or VersionError."""
    if len(data) > ATTACH_MESSAGE_BYTES:
        raise InvalidArgumentError(f"the attach request is larger than {ATTACH_MESSAGE_BYTES} bytes")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidArgumentError("the attach request is not JSON") from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError("the attach request is not a JSON object")
    protocol = fields.get("protocol", PROTOCOL_VERSION)
    if protocol != PROTOCOL_VERSION:
        raise VersionError(
            f"the client speaks protocol {protocol!r:.20}, this daemon {PROTOCOL_VERSION}",
            "install the same version of client and daemon",
        )
    try:
        return AttachRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidArgumentError(f"the attach request's {where}: {first['msg']}: {first['input']!r:.100}") from None


def reserve_shared_memory(size: int) -> int:
    """A descriptor of new shared memory of that size with all of its pages there, and no name.

    Raises NoMemoryError with the numbers: better now than SIGBUS at the first touch.
    """
    memory = posix_ipc.SharedMemory(f"/syshax-{secrets.token_hex(16)}", posix_ipc.O_CREX, mode=0o600)
    descriptor: int = memory.fd
    memory.unlink()
    try:
        available = meminfo().get("MemAvailable", size)
        if size > available:
            raise NoMemoryError(
                f"the session needs {human_size(size)} of memory, {human_size(available)} are available"
            )
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        free, total = shm_free_bytes()
        raise NoMemoryError(
            f"the session needs {human_size(size)} of shared memory, /dev/shm has {human_size(free)} of "
            f"{human_size(total)} free",
            "enlarge it (mount -o remount,size=...; a container: --shm-size), or ask for fewer tokens or slots",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refusal(error: SyshaxError) -> bytes:
    """The error as a datagram that fits."""
    body = ErrorBody(code=error.code, message=error.message[:4000], hint=error.hint[:1000])
    return ErrorAnswer(error=body).model_dump_json().encode()
