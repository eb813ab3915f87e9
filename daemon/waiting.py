"""Connections on the attach socket that have not said yet what they want.

Owns how many there may be, so that nobody can keep others from attaching by connecting and saying nothing: each user
has room for so many, and its oldest makes room for its newest. A client says what it wants right after it connects, so
it is the silent ones that go.
"""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import suppress

from syshax.errors import LimitError
from syshaxd.attach import refusal

PER_USER = 64
IN_ALL = 256


class Waiting:
    """In the order in which they came."""

    def __init__(self) -> None:
        self._users: dict[socket.socket, int] = {}

    def __len__(self) -> int:
        return len(self._users)

    def enter(self, connection: socket.socket, uid: int) -> None:
        counts = Counter(self._users.values())
        if counts[uid] >= PER_USER:
            self._put_out(uid)
        elif len(self._users) >= IN_ALL:
            self._put_out(counts.most_common(1)[0][0])
        self._users[connection] = uid

    def leave(self, connection: socket.socket) -> None:
        """It has said what it wants, or is gone."""
        self._users.pop(connection, None)

    def end_all(self) -> None:
        for connection in self._users:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _put_out(self, uid: int) -> None:
        """Its coroutine sees the connection's end."""
        oldest = next(connection for connection, owner in self._users.items() if owner == uid)
        del self._users[oldest]
        error = LimitError(
            f"user {uid} has {PER_USER} newer connections that have not said what they want",
            "send the attach request right after connecting",
        )
        with suppress(OSError):
            oldest.send(refusal(error))
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
