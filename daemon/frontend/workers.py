"""The vLLM workers behind the front-end: which are ready, what they serve, how many requests they have.

Readiness is checked actively (GET /health, then /v1/models) and passively (a request that cannot connect), asks syshaxd
for the worker's experts where that is known, and heals by itself. This file knows nothing of clients' requests beyond
their count.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError

from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.daemon_view import DaemonView, Experts
from syshaxd.frontend.metrics import Metrics
from syshaxd.frontend.pace import Pace
from syshaxd.frontend.upstream import Upstream, WorkerError

log = logging.getLogger("syshax.api")


class _Listed(BaseModel):
    data: list[dict[str, Any]]


class Worker:
    """One worker: its connections, its state and how many of our requests it is answering."""

    def __init__(self, url: str, group: str, config: ApiConfig, metrics: Metrics, board: Board) -> None:
        """`group`: the name of a group of the configuration."""
        self.url, self.group = url, group
        self.authorization = config.worker_groups()[group].authorization()
        """The Authorization that it asks for, instead of the client's; "" if none."""
        self.seed = int.from_bytes(hashlib.blake2b(url.encode(), digest_size=8).digest(), "little")
        """Tells it from others in hashes of conversations."""
        self.name = f"{group}-{self.seed % 0x1000000:06x}"
        """For clients: the same in all processes and after restarts."""
        self.pace = Pace()
        self.ready = False
        self.draining = False
        """It finishes what it has and gets nothing new."""
        self.leaving = False
        """Then it is gone. Another worker may have its URL already, and the gauges with it."""
        self.reason = "not checked yet"
        self.models: dict[str, dict[str, Any]] = {}
        """Model id -> its object as the worker lists it; kept while the worker is away."""
        self.outstanding = board.cell(f"outstanding {url}")
        """Requests that it is answering, those of all our processes."""
        self.experts = Experts(url)
        self.turn = 0
        """When it was last picked: equals take turns."""
        self._config = config
        self._gauge = metrics.worker_ready.labels(url)
        self._experts_gauge = metrics.worker_experts.labels(url)
        self._strikes = 0
        self._answers, self._silence = False, self.reason
        """Its own answers: whether it may get requests by them, else why not."""
        self._wake = asyncio.Event()
        self.looked_at = asyncio.Event()
        """Set when the first check has ended."""
        self.upstream = Upstream(url, config.timeouts.connect_seconds, config.limits.header)

    @property
    def takes_requests(self) -> bool:
        return self.ready and not self.draining

    @property
    def waits_for_experts(self) -> bool:
        """It answers, and its experts were attached lately: its requests wait in it until they are again."""
        away = self.experts.reason and self._answers and not self.draining
        return bool(away) and self.experts.away_seconds() < self._config.daemon.wait_seconds

    async def watch(self) -> None:
        """Checks for ever; `suspect` makes the next check come at once."""
        health = self._config.health
        while True:
            self._wake.clear()
            await self._check()
            self.looked_at.set()
            pause = health.interval_seconds if self.ready else health.retry_seconds
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)

    async def close(self) -> None:
        """Its connections end; this process has no opinion of it any more."""
        if not self.leaving:
            self._forget()
        await self.upstream.close()

    def leave(self) -> None:
        """It is wanted no more: it finishes what it has, and this process has no opinion of it any more."""
        self.draining = self.leaving = True
        self._forget()

    def stay(self) -> None:
        """It is wanted again."""
        self.leaving = False
        self._show()

    def suspect(self) -> None:
        """A request failed on it in a way that does not prove it gone."""
        self._wake.set()

    def mark_down(self, reason: str) -> None:
        """No new requests until a check succeeds."""
        self._answers, self._silence = False, reason
        self._settle()
        self._wake.set()

    def look_at_experts(self, view: DaemonView) -> None:
        """What syshaxd says of it counts too."""
        self.experts.look(view)
        self._settle()

    def _settle(self) -> None:
        reason = self.experts.reason if self._answers else self._silence
        if reason and self.ready:
            log.warning("worker %s is not ready: %s", self.url, reason)
        elif reason and self.reason != reason:
            log.info("worker %s: %s", self.url, reason)
        elif not reason and not self.ready:
            log.info("worker %s is ready: %s", self.url, ", ".join(self.models))
        self.ready, self.reason = not reason, reason
        if not self.leaving:
            self._show()

    def _show(self) -> None:
        self._gauge.set(self.ready)
        if self.experts.state != "not known":
            self._experts_gauge.set(self.experts.state == "attached")

    def _forget(self) -> None:
        self._gauge.forget()
        self._experts_gauge.forget()

    async def _check(self) -> None:
        try:
            async with asyncio.timeout(self._config.health.timeout_seconds):
                models = await self._ask()
        except TimeoutError:
            self._strikes += 1
            if self._strikes >= 2 or not self._answers:
                self.mark_down(f"no answer in {self._config.health.timeout_seconds:g} s")
        except (WorkerError, ValueError) as error:
            self.mark_down(str(error))
        else:
            self._strikes = 0
            if self.ready and models.keys() != self.models.keys():
                log.info("worker %s has now: %s", self.url, ", ".join(models))
            self.models, self._answers = models, True
            self._settle()
            return
        self._wake.clear()

    async def _ask(self) -> dict[str, dict[str, Any]]:
        headers = f"Authorization: {self.authorization}\r\n".encode() if self.authorization else b""
        status, _ = await self.upstream.get("/health", headers)
        if status != HTTPStatus.OK:
            raise ValueError(f"/health answers {status}")
        status, body = await self.upstream.get("/v1/models", headers)
        if status == HTTPStatus.UNAUTHORIZED:
            raise ValueError("it asks for another API key (key_file of its group)")
        if status != HTTPStatus.OK:
            raise ValueError(f"/v1/models answers {status}")
        try:
            listed = _Listed.model_validate_json(body).data
        except ValidationError:
            raise ValueError("/v1/models does not answer with a list of models") from None
        models = {str(model["id"]): model for model in listed if "id" in model}
        if not models:
            raise ValueError("/v1/models lists no model")
        return models


class Workers:
    """All configured workers."""

    def __init__(self, config: ApiConfig, metrics: Metrics, board: Board) -> None:

        def make(url: str, group: str) -> Worker:
            return Worker(url, group, config, metrics, board)

        self._make = make
        self.all = [self._make(url, name) for name, group in config.worker_groups().items() for url in group.workers]
        self.view = DaemonView(config.daemon.view_socket)
        self._daemon_seen = metrics.daemon_seen
        self._watches: dict[Worker, asyncio.Task[None]] = {}
        self._view_watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watches = {worker: asyncio.create_task(worker.watch()) for worker in self.all}
        self._view_watch = asyncio.create_task(self.view.watch(self._look_at_experts))

    def add(self, url: str, group: str) -> None:
        """One more. `group`: the name of a group of the configuration."""
        worker = self._make(url, group)
        self.all.append(worker)
        self._watches[worker] = asyncio.create_task(worker.watch())

    async def remove(self, worker: Worker) -> None:
        """It is gone at once; what it answers breaks off."""
        self.all.remove(worker)
        watch = self._watches.pop(worker)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await worker.close()

    def _look_at_experts(self) -> None:
        self._daemon_seen.set(self.view.sessions is not None)
        for worker in self.all:
            worker.look_at_experts(self.view)

    async def first_look(self, seconds: float) -> None:
        """Until every worker has been checked once, at most that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(worker.looked_at.wait() for worker in self.all))

    async def close(self) -> None:
        """Ends checks and connections."""
        tasks = [*self._watches.values(), *([self._view_watch] if self._view_watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self.all:
            await worker.close()
        await self.view.close()

    def models(self) -> dict[str, dict[str, Any]]:
        """Model id -> object, of ready workers; the first that lists an id gives its object."""
        merged: dict[str, dict[str, Any]] = {}
        for worker in self.all:
            for name, listed in worker.models.items() if worker.takes_requests else ():
                merged.setdefault(name, listed)
        return merged

    def unready_reason(self) -> str:
        """Why no request can be served; "" when one can."""
        if any(worker.takes_requests for worker in self.all):
            return ""
        reasons = "; ".join(dict.fromkeys(worker.reason or "it is draining" for worker in self.all))
        return f"no worker is ready ({len(self.all)} known): {reasons}" if self.all else "there is no worker"
