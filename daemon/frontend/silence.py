"""Connections whose other side vanishes without a word: a host that loses its power, a network that is cut.

Nobody closes such a connection, and by itself TCP asks after two hours whether anybody is there. Owns what has it ask
sooner; that the connection then ends with an error is all that its user sees.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """A connection on which nothing has come for `idle` seconds is asked about every `every` seconds, and ends after
    `probes` questions without an answer. `unread`: it also ends when what was sent is not taken for so many seconds;
    0: as the system has it, a quarter of an hour while nothing is acknowledged."""

    idle: int
    every: int
    probes: int
    unread: int = 0

    def hold_for(self, transport: asyncio.BaseTransport) -> None:
        """From now on; Unix sockets need none."""
        found = transport.get_extra_info("socket")
        if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
            return
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.idle)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.every)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self.probes)
        if self.unread:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.unread * 1000)
