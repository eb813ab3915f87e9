"""Which worker answers a request: aliases, what a key may use, groups by priority, least loaded or warmest cache.

A request becomes an `Ask` here and gets a worker with a place reserved (`take`), at once or after waiting in line; the
place is given back by `release`. Everything is decided from counters that all processes share, and nothing is kept
of a conversation: requests that begin alike score the workers alike (rendezvous hashing), in every process.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from time import monotonic
from typing import Any

from syshaxd.frontend import bodies
from syshaxd.frontend.board import Board
from syshaxd.frontend.bodies import Body
from syshaxd.frontend.config import PRIORITIES, ApiConfig
from syshaxd.frontend.errors import ApiError, Kind, quoted
from syshaxd.frontend.keys import Key
from syshaxd.frontend.metrics import Metrics
from syshaxd.frontend.waiting import Waiting
from syshaxd.frontend.workers import Worker, Workers

NORMAL = PRIORITIES.index("normal")
"""Of requests without a key."""
VLLM_PRIORITIES = (0, 10, 20)
"""What interactive, normal and batch are to vLLM, which serves lower ones first and takes 0 where there is none."""
_MASK = (1 << 64) - 1


@dataclass(eq=False, slots=True)
class Ask:
    """One request as routing sees it. `model`: as workers call it, None where none is named."""

    path: str
    body: Body
    model: str | None
    key: Key | None
    priority: int


@dataclass(frozen=True)
class _Group:
    priority: int
    sets_priority: bool
    most: int
    """Requests in progress of one worker."""


class Router:
    """Routing of one process."""

    def __init__(self, config: ApiConfig, workers: Workers, metrics: Metrics, board: Board) -> None:
        self._workers = workers
        self._metrics = metrics
        self._aliases = config.aliases
        self._affinity = config.affinity
        self._alone = board.rows == 1
        self._turns = itertools.count(1)
        self._groups = {
            name: _Group(
                PRIORITIES.index(group.priority),
                group.vllm_priority,
                group.requests_per_worker or config.queue.requests_per_worker,
            )
            for name, group in config.worker_groups().items()
        }
        self.waiting = Waiting(config.queue, board, self._candidates, self._free, self._reserve, self.release)

    def ask(self, path: str, headers: Mapping[str, str], raw: bytes, key: Key | None) -> Ask:
        """Reads a body. `ApiError` 400 for malformed JSON, 404 for a model that the key may not use."""
        body = bodies.read(path, headers, raw)
        named = body.model
        model = self._aliases.get(named, named) if named is not None else None
        if key is not None and key.models is not None:
            self._check_allowed(key, named, model)
        return Ask(path, body, model, key, NORMAL if key is None else key.priority)

    async def take(self, ask: Ask) -> Worker:
        """A worker with a place for this request; waits in line for one where it must.

        `ApiError`: 503 when no worker is ready or none that serves the model, 404 for an unknown model, 400 when no
        model is named and the workers serve several, 429 when too many requests wait or this one has for too long.
        """
        found = self._candidates(ask.model, ask.priority, ask.key)
        queue = self._metrics.queue(ask.model or "", PRIORITIES[ask.priority])
        if not self.waiting.everywhere.total():
            worker = self._choose(ask, found)
            if worker is not None and self._reserve(worker):
                queue.seconds.observe(0.0)
                return worker
        begun = monotonic()
        queue.waiting.inc()
        try:
            worker = await self.waiting.wait(
                ask.model, ask.priority, lambda: self._choose(ask, self._candidates(ask.model, ask.priority))
            )
        finally:
            queue.waiting.dec()
        queue.seconds.observe(monotonic() - begun)
        return worker

    def take_again(self, ask: Ask, failed: Worker) -> Worker:
        """For a second try: another worker if there is one, else the same. It need not wait, it had a place."""
        found = self._candidates(ask.model, ask.priority, ask.key)
        found = [worker for worker in found if worker is not failed] or found
        worker = min(found, key=lambda worker: worker.outstanding.total())
        worker.outstanding.add(1)
        return worker

    def release(self, worker: Worker) -> None:
        """Gives a place back; the next in line gets it."""
        worker.outstanding.add(-1)
        worker.pace.note()
        if self.waiting.count:
            self.waiting.fill(worker)

    def bytes_for(self, ask: Ask, worker: Worker) -> bytes:
        """The body as this worker is to get it. `ApiError` 400 where what must be changed cannot be."""
        model = None if ask.model == ask.body.model else ask.model
        priority = None
        if ask.key is not None and self._groups[worker.group].sets_priority:
            priority = VLLM_PRIORITIES[ask.priority]
        return ask.body.changed(model, priority)

    def alternatives(self, ask: Ask, without: Worker) -> bool:
        """Whether another ready worker could answer as well."""
        return any(worker is not without for worker in self._serving(ask.model))

    def models(self, key: Key | None) -> dict[str, dict[str, Any]]:
        """Name -> object of all models of ready workers and of the aliases of these, as far as the key may use them."""
        served = self._workers.models()
        aliases = {alias: {**served[model], "id": alias} for alias, model in self._aliases.items() if model in served}
        listed = {**served, **aliases}
        return {name: model for name, model in listed.items() if self._allowed(key, name)}

    def pace(self) -> float:
        """Requests that end, per second, here lately."""
        return sum(worker.pace.per_second() for worker in self._workers.all)

    def _allowed(self, key: Key | None, name: str) -> bool:
        return key is None or key.models is None or name in key.models or self._aliases.get(name, name) in key.models

    def _check_allowed(self, key: Key, named: str | None, model: str | None) -> None:
        assert key.models is not None
        if named is not None:
            if named not in key.models and model not in key.models:
                raise self._unknown(named, key)
        elif not all(key.models >= worker.models.keys() for worker in self._serving(None)):
            raise ApiError(
                Kind.MODEL_MISSING,
                "This key may not use every model here, so its requests must name one that it may use, in JSON or in "
                f"a form, not compressed: {_names(self.models(key))}.",
                param="model",
            )

    def _serving(self, model: str | None) -> list[Worker]:
        """Ready workers; without one those that wait for their experts, as a restarting daemon has them do."""
        serving = [worker for worker in self._workers.all if model is None or model in worker.models]
        ready = [worker for worker in serving if worker.takes_requests]
        return ready or [worker for worker in serving if worker.waits_for_experts]

    def _candidates(self, model: str | None, priority: int, key: Key | None = None) -> list[Worker]:
        """Workers of the groups whose priority is nearest; of two that are as near the lower one."""
        found = self._serving(model)
        if not found:
            raise self._not_served(model, key)
        if model is None:
            self._check_one_model(key)
        if len(self._groups) == 1 or len(found) == 1:
            return found
        ranks = [self._groups[worker.group].priority for worker in found]
        best = min(ranks, key=lambda rank: (abs(rank - priority), -rank))
        return [worker for worker, rank in zip(found, ranks, strict=True) if rank == best]

    def _free(self, worker: Worker) -> bool:
        return worker.outstanding.total() < self._groups[worker.group].most

    def _reserve(self, worker: Worker) -> bool:
        worker.outstanding.add(1)
        if self._alone or worker.outstanding.total() <= self._groups[worker.group].most:
            return True
        worker.outstanding.add(-1)
        return False

    def _choose(self, ask: Ask, found: Sequence[Worker]) -> Worker | None:
        """The warmest or else least loaded one of those that may have one more request."""
        free = [
            (load, worker.turn, worker)
            for worker in found
            if (load := worker.outstanding.total()) < self._groups[worker.group].most
        ]
        if len(free) < 2:
            return free[0][2] if free else None
        if self._affinity.enabled:
            beginning = ask.body.beginning(ask.path, self._affinity.prompt_bytes)
            if beginning and (warm := warmest(beginning, free, self._affinity.load_factor)) is not None:
                return warm
        worker = min(free, key=itemgetter(0, 1))[2]
        worker.turn = next(self._turns)
        return worker

    def _check_one_model(self, key: Key | None) -> None:
        served = {frozenset(worker.models) for worker in self._serving(None)}
        if len(served) > 1:
            raise ApiError(
                Kind.MODEL_MISSING,
                f"This request must name its model; known models: {_names(self.models(key))}.",
                param="model",
            )

    def _not_served(self, model: str | None, key: Key | None) -> ApiError:
        if reason := self._workers.unready_reason():
            return ApiError(Kind.NOT_READY, f"{reason}.", headers=(("Retry-After", "1"),))
        if model is None or any(model in worker.models for worker in self._workers.all):
            which = "the request" if model is None else f"the model `{quoted(model)}`"
            return ApiError(Kind.NOT_READY, f"No worker that serves {which} is ready.", headers=(("Retry-After", "1"),))
        return self._unknown(model, key)

    def _unknown(self, model: str, key: Key | None) -> ApiError:
        message = f"The model `{quoted(model)}` does not exist. Known models: {_names(self.models(key))}."
        unseen = sum(not worker.models for worker in self._workers.all)
        if unseen:
            message += f" {unseen} of {len(self._workers.all)} workers have not answered yet."
        return ApiError(Kind.NO_MODEL, message, param="model")


def priority_of(key: Key | None) -> str:
    """The priority's name."""
    return PRIORITIES[NORMAL if key is None else key.priority]


def warmest(beginning: bytes, free: Sequence[tuple[int, int, Worker]], factor: float) -> Worker | None:
    """Of (load, turn, worker): the worker that this beginning's requests go to, unless that would lift it over `factor`
    times the mean of the loads; then the next one in the beginning's own order.
    """
    most = factor * (sum(load for load, _, _ in free) + 1) / len(free)
    place = int.from_bytes(hashlib.blake2b(beginning, digest_size=8).digest(), "little")
    able = [worker for load, _, worker in free if load < most]
    return max(able, key=lambda worker: mixed(place ^ worker.seed), default=None)


def mixed(number: int) -> int:
    """64 bits in, 64 bits out, each depending on all (the finaliser of splitmix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def _names(models: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in models) or "none"
