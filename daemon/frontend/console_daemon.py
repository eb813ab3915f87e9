"""The daemon's part of the console: its nodes, sessions, and who of the experts is asked for how often.

Asks the view socket only while somebody watches. Bandwidth is what the experts' weights that were read weigh, by time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any
from urllib.parse import quote

from syshax.protocol import ExpertsAnswer, ModelState, StatusAnswer
from syshaxd.frontend.daemon_view import DaemonView, ViewError

LOOK_SECONDS = 2.0
HEAT_SECONDS = 60.0
"""What the heat map shows is of the last minute, once there is one."""
MODELS = 8
"""Heat maps of so many models at most."""
_SESSIONS = 64


class _Counts:
    """One model's experts as the daemon counted them, at a few times."""

    def __init__(self, answer: ExpertsAnswer) -> None:
        self.newest = answer
        self._taken: deque[tuple[float, list[int], int]] = deque()

    def add(self, answer: ExpertsAnswer, now: float) -> None:
        flat = [count for row in answer.tokens for count in row]
        if self._taken and (answer.bytes_read < self._taken[-1][2] or len(flat) != len(self._taken[-1][1])):
            self._taken.clear()  # it was loaded anew
        while self._taken and now - self._taken[0][0] > HEAT_SECONDS + LOOK_SECONDS:
            self._taken.popleft()
        self._taken.append((now, flat, answer.bytes_read))
        self.newest = answer

    def bytes_per_second(self) -> float:
        if len(self._taken) < 2:
            return 0.0
        (before, _, first), (now, _, last) = self._taken[-2], self._taken[-1]
        return max(0, last - first) / (now - before)

    def heat(self) -> dict[str, Any]:
        """Each expert's tokens in percent of its layer's mean: 100 everywhere if all were asked for alike."""
        at, counts, _ = self._taken[-1]
        began, before, _ = self._taken[0]
        recent = [late - early for late, early in zip(counts, before, strict=True)]
        seconds = at - began
        if not any(recent):
            recent, seconds = counts, 0.0
        experts = self.newest.experts
        percent: list[int] = []
        for start in range(0, len(recent), experts):
            row = recent[start : start + experts]
            mean = sum(row) / experts
            percent += [round(100 * count / mean) if mean else 0 for count in row]
        return {
            "model": self.newest.name,
            "layers": self.newest.layers,
            "experts": experts,
            "layer_ids": self.newest.layer_ids,
            "percent": percent,
            "tokens": sum(recent),
            "seconds": round(seconds),
        }


class DaemonWatch:
    def __init__(self, view: DaemonView) -> None:
        self._view = view
        self._status: StatusAnswer | None = None
        self._trouble = ""
        self._counts: dict[str, _Counts] = {}
        self._boot = ""
        self._looked = 0.0
        self.experts: dict[str, Any] | None = None

    async def look(self) -> dict[str, Any] | None:
        """Asks the daemon when that is due; the heat maps if they are new."""
        now = time.monotonic()
        if not self._view.path or now - self._looked < LOOK_SECONDS - 0.2:
            return None
        self._looked = now
        try:
            status = await self._view.get("/v1/status", StatusAnswer)
            ready = [model.name for model in status.models if model.state is ModelState.READY][:MODELS]
            if status.boot_id != self._boot:
                self._boot, self._counts = status.boot_id, {}
            answers = await asyncio.gather(
                *(self._view.get(f"/v1/models/{quote(name, safe='')}/experts", ExpertsAnswer) for name in ready)
            )
        except ViewError as error:
            self._status, self._trouble, self.experts = None, str(error), None
            return {"models": []}
        self._status, self._trouble = status, ""
        self._counts = {
            name: self._counts.get(name) or _Counts(answer) for name, answer in zip(ready, answers, strict=True)
        }
        for name, answer in zip(ready, answers, strict=True):
            self._counts[name].add(answer, now)
        self.experts = {"models": [counts.heat() for counts in self._counts.values()]}
        return self.experts

    def shown(self) -> dict[str, Any]:
        """`state` is "not asked" where no socket is configured, "not seen" where none answers."""
        if not self._view.path:
            return {"state": "not asked"}
        status = self._status
        if status is None:
            return {"state": "not seen", "reason": self._trouble or self._view.trouble}
        read = sum(counts.bytes_per_second() for counts in self._counts.values())
        return {
            "state": status.state,
            "reason": status.reason,
            "version": status.version,
            "cpu": status.cpu,
            "isa": status.isa,
            "uptime": round(status.uptime_seconds),
            "pool": status.pool_bytes,
            "limit": status.memory_limit_bytes,
            "warnings": len(status.warnings),
            "read": round(read),
            "models": [
                {"name": model.name, "state": model.state.value, "format": model.format, "sessions": model.sessions}
                for model in status.models
            ],
            "nodes": [
                {
                    "node": node.node,
                    "threads": node.threads,
                    "busy": round(node.busy_fraction, 3),
                    "pool": node.pool_bytes,
                    "memory": node.memory_bytes,
                    "free": node.free_bytes,
                    "read": round(read * node.share),
                }
                for node in status.nodes
            ],
            "sessions": [
                {
                    "id": session.session_id,
                    "model": session.model,
                    "priority": session.priority.value,
                    "address": session.address,
                    "tokens": session.tokens,
                    "in_flight": session.in_flight,
                    "use": round(session.use, 3),
                    "wait": [session.wait_ms_p50, session.wait_ms_p99],
                    "service": [session.service_ms_p50, session.service_ms_p99],
                    "stale": session.stale,
                }
                for session in (self._view.sessions or [])[:_SESSIONS]
            ],
        }
