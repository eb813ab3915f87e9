"""One attached client as the control plane knows it: what it asked for, what it was given since, and its connection.

Owns these facts alone. Who makes, changes and ends sessions is sessions.py; what they did is session_reports.py.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from syshax.errors import SyshaxError
from syshax.protocol import AttachRequest, Priority
from syshaxd.attach import refusal
from syshaxd.core import CoreModel
from syshaxd.peers import Peer
from syshaxd.registry import Entry
from syshaxd.session_totals import Totals


@dataclass(eq=False)
class Session:
    """One attached client."""

    session_id: int
    entry: Entry
    model: CoreModel
    request: AttachRequest
    peer: Peer
    connection: socket.socket
    layout: dict[str, int]
    priority: Priority = Priority.NORMAL
    own_share: int | None = None
    """Percent, where an administrator set one for this session; None: the configuration's."""
    attached_at: float = field(default_factory=time.monotonic)
    last_word: SyshaxError | None = None
    end_reason: str = ""
    heartbeat: int = -1
    alive_at: float = field(default_factory=time.monotonic)
    """When its process was last seen running, or its heartbeat counting."""
    stale: bool = False
    reclassed: Totals = field(default_factory=Totals)
    """What it had done when it came into its present class."""

    @property
    def shm_bytes(self) -> int:
        return self.layout["total_bytes"]

    @property
    def tokens_in_flight(self) -> int:
        """The most that its slots allow."""
        return self.request.num_slots * self.request.max_tokens

    def say(self, last_word: SyshaxError) -> None:
        """Why it ends, for the client to find when it sees that. Only the first counts."""
        if self.last_word is None:
            self.last_word = last_word
            with suppress(OSError):
                self.connection.send(refusal(last_word))

    def hang_up(self, reason: str) -> None:
        """Shuts the connection down: the client sees that its lease is over, the session's coroutine cleans up."""
        self.end_reason = self.end_reason or reason
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
