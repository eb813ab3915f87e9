"""What a client may have when it attaches: the configured limits, and the class that it may ask for.

Owns the comparison and its words. Limits are read at each attach; what is attached already is not cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from syshax.errors import LimitError
from syshax.protocol import AttachRequest, Priority
from syshaxd.config import Config
from syshaxd.peers import Peer
from syshaxd.quantities import human_size

if TYPE_CHECKING:
    from syshaxd.session import Session


def check_limits(
    request: AttachRequest, shm_bytes: int, peer: Peer, attached: Iterable[Session], config: Config
) -> None:
    """Raises LimitError naming what was asked for, the key and what it allows."""
    limits, sessions = config.limits, list(attached)
    held = sum(session.shm_bytes for session in sessions)
    rows = [
        ("max_tokens", request.max_tokens, limits.tokens_per_session, "tokens_per_session"),
        ("num_slots", request.num_slots, limits.slots, "slots"),
        ("num_slots x max_tokens", request.num_slots * request.max_tokens, limits.tokens_in_flight, "tokens_in_flight"),
        ("the session's memory", shm_bytes, limits.shared_memory_per_session, "shared_memory_per_session"),
        ("all sessions' memory", held + shm_bytes, limits.shared_memory_total, "shared_memory_total"),
        ("the number of sessions", len(sessions) + 1, limits.sessions, "sessions"),
    ]
    for what, wanted, allowed, key in rows:
        if wanted > allowed:
            text = human_size if "memory" in key else str
            raise LimitError(
                f"{what} would be {text(wanted)}, limits.{key} allows {text(allowed)}",
                f"ask for less, or raise it: syshaxctl config set limits.{key} ...",
            )
    if peer.uid not in (0, os.geteuid()):
        _check_user(shm_bytes, [session for session in sessions if session.peer.uid == peer.uid], peer.uid, config)
    _check_class(request.priority, config)


def _check_user(shm_bytes: int, own: list[Session], uid: int, config: Config) -> None:
    """One user leaves the others some."""
    limits = config.limits
    part = limits.user_part
    memory, most = shm_bytes + sum(session.shm_bytes for session in own), limits.shared_memory_total * part // 100
    rows = [
        (str(len(own) + 1), max(1, limits.sessions * part // 100), len(own) + 1, "sessions"),
        (f"{human_size(memory)} of memory", most, memory, "shared_memory_total"),
    ]
    for text, allowed, wanted, key in rows:
        if wanted > allowed:
            raise LimitError(
                f"the sessions of user {uid} would be {text}: more than {part} % of limits.{key}",
                "end some of them, or raise it: syshaxctl config set limits.user_part ...",
            )


def _check_class(priority: Priority, config: Config) -> None:
    highest = Priority(config.scheduling.highest)
    if priority.code < highest.code:
        raise LimitError(
            f"priority {priority.value} is above {highest.value}, the highest that scheduling.highest allows",
            f"ask for {highest.value}; an administrator may raise one session with `syshaxctl sessions set ID "
            f"--priority {priority.value}`, or all: syshaxctl config set scheduling.highest {priority.value}",
        )
