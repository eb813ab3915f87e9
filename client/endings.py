"""Why a session ended, in words: one table from the ring's closing codes to errors.

The daemon sends such an error as its last message on the session's connection, with what it knows besides; a client
that finds the code alone makes the same error from it. Which of them a client answers by attaching again is decided
here, by the class: DaemonLostError may be waited out, SessionEndedError must not be.
"""

from __future__ import annotations

from syshax.errors import DaemonLostError, SessionEndedError, SyshaxError
from syshax.protocol import Closing

_RING_HINT = "a fault of the program that writes the ring; the ring's rules are in docs/RING.md"
_WHY: dict[int, tuple[type[SyshaxError], str, str]] = {
    Closing.DRAINING: (DaemonLostError, "syshaxd stops", "open the model again when it is back"),
    Closing.BROKEN_QUEUE: (SessionEndedError, "its request queue makes no sense", _RING_HINT),
    Closing.TRUNCATED: (SessionEndedError, "the client truncated its shared memory", _RING_HINT),
    Closing.KICKED: (
        SessionEndedError,
        "an administrator or its own user ended it",
        "open the model again only if that is meant; `syshaxctl sessions` shows who is attached",
    ),
    Closing.STOPPED: (
        DaemonLostError,
        "its process was stopped for too long",
        "open the model again; limits.stopped_seconds says how long is too long",
    ),
}


def ending(closing: int, detail: str = "") -> SyshaxError:
    """The error of a session that ended with this code. detail: what the daemon knows better than the code."""
    if closing == Closing.OPEN:
        return DaemonLostError(detail or "the connection to syshaxd ended", "open the model again")
    unknown = (SessionEndedError, f"reason {closing}, which this version does not know", "install the daemon's version")
    error, why, hint = _WHY.get(closing, unknown)
    return error(f"syshaxd ended this session: {detail or why}", hint)
