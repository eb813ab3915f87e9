"""Who is at the other end of a Unix socket, as the kernel says.

Owns SO_PEERCRED and SO_PEERGROUPS. What a peer may do is control/rights.py's.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("3i")
_GROUPS_BYTES = 1024
"""The most that Python's getsockopt takes: 256 groups."""


class SocketOptions(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Peer:
    """pid is 0 where the peer's process is not visible from here (a sibling PID namespace)."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]

    def __str__(self) -> str:
        return f"uid {self.uid}, pid {self.pid}"


def peer_of(connection: SocketOptions) -> Peer:
    """The process that connected, with its groups as they were then."""
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
        groups = struct.unpack(f"{len(packed) // 4}I", packed)
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.ENOPROTOOPT):
            raise
        groups = _groups_of_user(uid, gid)
    return Peer(pid, uid, gid, frozenset([gid, *groups]))


def _groups_of_user(uid: int, gid: int) -> tuple[int, ...]:
    """By the user database, for a process in more groups than fit."""
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return ()
