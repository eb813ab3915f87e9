"""How fast requests have come to their end lately, and what a client that must wait is told for it: Retry-After."""

from __future__ import annotations

import math
from collections import deque
from time import monotonic

_SECONDS = 60.0
_LONGEST_RETRY_SECONDS = 600


class Pace:
    """How fast requests have come to their end lately."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def note(self) -> None:
        self._ends.append(monotonic())

    def per_second(self) -> float:
        """0.0 when nothing is known."""
        now, ends = monotonic(), self._ends
        while ends and now - ends[0] > _SECONDS:
            ends.popleft()
        return len(ends) / max(now - ends[0], 0.001) if len(ends) > 1 else 0.0


def retry_after(ahead: int, per_second: float, unknown: float) -> tuple[tuple[str, str], ...]:
    """The header that tells when `ahead` requests will have ended, `unknown` seconds if no pace is known."""
    seconds = ahead / per_second if per_second else unknown
    return (("Retry-After", str(min(max(math.ceil(seconds), 1), _LONGEST_RETRY_SECONDS))),)
