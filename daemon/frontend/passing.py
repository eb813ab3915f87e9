"""How accepted connections get from the supervisor to a child, so that none is lost when either ends.

The supervisor keeps a connection until the child says that it has taken it, before it reads a byte of it; so whatever
a child that dies has not taken goes to another one untouched.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger("syshax.api")
MOST_UNTAKEN = 256
"""A child that has taken none of so many gets no more."""
_AT_ONCE = 32
_AGAIN_SECONDS = 0.05
_NUMBER = struct.Struct("<Q")
_REPLY = struct.Struct("<?Q")


def pair() -> tuple[socket.socket, socket.socket]:
    """The supervisor's end and the child's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


class Giver:
    """The supervisor's end. `refused` is called with a connection for which the child had no descriptor left."""

    def __init__(self, end: socket.socket, refused: Callable[[socket.socket], None]) -> None:
        self._end, self._refused = end, refused
        self._numbers = itertools.count(1)
        self.untaken: dict[int, socket.socket] = {}
        self.given = 0
        """How many in all."""
        asyncio.get_running_loop().add_reader(end, self._hear)

    def give(self, connection: socket.socket) -> bool:
        """False when the child cannot be given more now."""
        if len(self.untaken) >= MOST_UNTAKEN:
            return False
        number = next(self._numbers)
        try:
            socket.send_fds(self._end, [_NUMBER.pack(number)], [connection.fileno()])
        except OSError:
            return False
        self.untaken[number] = connection
        self.given += 1
        return True

    def close(self) -> list[socket.socket]:
        """The child has ended; what it has not taken."""
        self._hear()
        with suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(self._end)
        self._end.close()
        left, self.untaken = list(self.untaken.values()), {}
        return left

    def _hear(self) -> None:
        with suppress(OSError):
            while reply := self._end.recv(_REPLY.size):
                taken, number = _REPLY.unpack(reply)
                if not taken:
                    self._refused(self.untaken.pop(number))
                    continue
                for known in [known for known in self.untaken if known <= number]:
                    self.untaken.pop(known).close()
            asyncio.get_running_loop().remove_reader(self._end)


class Taker:
    """The child's end: every connection gets a protocol of `serve`."""

    def __init__(self, end: socket.socket, serve: Callable[[], asyncio.Protocol]) -> None:
        self._end, self._serve = end, serve
        self._replies: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._end, self.take)

    async def stop(self) -> None:
        """Takes nothing more; returns when what was taken has its protocol."""
        asyncio.get_running_loop().remove_reader(self._end)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def take(self, most: int = _AT_ONCE) -> None:
        """What is there, at most so many."""
        taken: list[int] = []
        last = 0
        for _ in range(most):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._end, _NUMBER.size, 1)
            except OSError:
                break
            if not data:
                asyncio.get_running_loop().remove_reader(self._end)
                break
            number = _NUMBER.unpack(data)[0]
            if descriptors:
                taken += descriptors
                last = number
            else:
                self._replies.append(_REPLY.pack(False, number))
        if taken:
            self._replies.append(_REPLY.pack(True, last))
        self._reply()
        for descriptor in taken:  # only a later turn of the loop reads from them
            task = asyncio.get_running_loop().create_task(self._connect(socket.socket(fileno=descriptor)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _reply(self) -> None:
        """That one was taken stands for those before it, but for those refused, which are told first."""
        while self._replies:
            try:
                self._end.send(self._replies[0])
            except BlockingIOError:
                asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._reply)
                return
            except OSError:
                self._replies.clear()
                return
            self._replies.pop(0)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._serve, connection)
        except OSError as error:
            log.warning("a connection was lost: %s", error)
            connection.close()
