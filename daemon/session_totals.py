"""Sums over sessions, those that have ended included, so that counters never go back.

Owns the counters by model and by class, and the samples from which a session's use of the data plane comes. The numbers
themselves are the core's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from syshax.protocol import Priority

if TYPE_CHECKING:
    from syshaxd.session import Session

Stats = Mapping[int, Mapping[str, Any]]
"""Session's number -> the core's row."""
_SAMPLES = 4


@dataclass
class Totals:
    """What sessions did."""

    requests: int = 0
    tokens: int = 0
    errors: int = 0
    queued_ns: int = 0
    compute_ns: int = 0
    charged_ns: int = 0
    throttled_ns: int = 0
    batched: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Totals:
        return cls(**{field.name: int(stats.get(field.name, 0)) for field in fields(cls)})

    def add(self, more: Totals, less: Totals | None = None) -> None:
        """Adds `more`, without what `less` of it was counted already."""
        for field in fields(self):
            name = field.name
            counted = 0 if less is None else getattr(less, name)
            setattr(self, name, getattr(self, name) + getattr(more, name) - counted)


class Ledger:
    """Counters of the daemon's life."""

    def __init__(self) -> None:
        self._by_model: dict[str, Totals] = {}
        self._by_class: dict[Priority, Totals] = {priority: Totals() for priority in Priority}
        self._samples: deque[tuple[float, dict[int, int]]] = deque(maxlen=_SAMPLES)

    def close(self, session: Session, stats: Mapping[str, Any]) -> None:
        """The session ended with these numbers."""
        done = Totals.of(stats)
        self._by_model.setdefault(session.entry.name, Totals()).add(done)
        self._by_class[session.priority].add(done, session.reclassed)

    def reclass(self, session: Session, stats: Mapping[str, Any]) -> None:
        """The session is about to leave its class."""
        done = Totals.of(stats)
        self._by_class[session.priority].add(done, session.reclassed)
        session.reclassed = done

    def by_model(self, living: Iterable[Session], stats: Stats) -> dict[str, Totals]:
        sums = {name: Totals(**vars(totals)) for name, totals in self._by_model.items()}
        for session in living:
            sums.setdefault(session.entry.name, Totals()).add(Totals.of(stats.get(session.session_id, {})))
        return sums

    def by_class(self, living: Iterable[Session], stats: Stats) -> dict[Priority, Totals]:
        sums = {priority: Totals(**vars(totals)) for priority, totals in self._by_class.items()}
        for session in living:
            if session.session_id in stats:
                sums[session.priority].add(Totals.of(stats[session.session_id]), session.reclassed)
        return sums

    def sample(self, stats: Stats) -> None:
        """Called every few seconds."""
        self._samples.append((time.monotonic(), {number: int(row["charged_ns"]) for number, row in stats.items()}))

    def use(self, session: Session, stats: Mapping[str, Any]) -> float:
        """Part of the data plane's time that went to the session over the last samples, 0 to 1."""
        now, charged = time.monotonic(), int(stats.get("charged_ns", 0))
        since, before = session.attached_at, 0
        if self._samples and self._samples[0][0] > since:
            since, before = self._samples[0][0], self._samples[0][1].get(session.session_id, 0)
        return max(0.0, min(1.0, (charged - before) / 1e9 / max(now - since, 1e-3)))
