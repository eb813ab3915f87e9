"""What can be asked of a running process, by its control socket, its supervisor or a signal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from syshax.errors import ConfigError, InvalidArgumentError
from syshaxd.frontend.console_data import quantile
from syshaxd.frontend.errors import ApiError, Kind
from syshaxd.frontend.fleet import Seen, Wanted
from syshaxd.frontend.metrics import LONG
from syshaxd.frontend.server import BREAK_OFF_SECONDS, Server
from syshaxd.frontend.workers import Worker

log = logging.getLogger("syshax.api")
_LOOK_SECONDS = 0.05


class Commands:
    """`do(name, ...)` for one server."""

    def __init__(self, server: Server, drain_seconds: float) -> None:
        """drain_seconds: for what a removed worker has to finish."""
        self._app, self._drain_seconds = server.app, drain_seconds
        self._leaving: dict[Worker, asyncio.Task[None]] = {}
        self._table: dict[str, Callable[..., Awaitable[Any]]] = {
            "reload": self.reload,
            "take_keys": self.take_keys,
            "workers": self.workers,
            "set_workers": self.set_workers,
        }

    async def do(self, name: str, **fields: Any) -> Any:
        """The command's answer, made for JSON. Raises `SyshaxError`."""
        if name not in self._table:
            raise InvalidArgumentError(f"there is no command {name!r}")
        return await self._table[name](**fields)

    async def reload(self) -> int | None:
        """Reads the API keys again; their number, None without keys. `ConfigError`: the old ones stay."""
        keys = self._app.keys
        if keys is None:
            return None
        keys.reload()
        return len(keys)

    async def take_keys(self, rows: dict[str, Any] | None) -> None:
        """Those of a supervisor that has read them."""
        if self._app.keys is not None and rows is not None:
            self._app.keys.take(rows)

    async def workers(self) -> list[dict[str, Any]]:
        """Every worker, as `fleet.Seen`."""
        self._app.metrics.learn()
        return [self._seen(worker).model_dump() for worker in self._app.workers.all]

    async def set_workers(self, wanted: list[dict[str, Any]]) -> None:
        """Makes the workers those of the list (`fleet.Wanted`); one that it lacks finishes what it has, then goes.

        A URL that comes in another group is another worker, also while the one before goes.
        """
        new = {(row.url, row.group): row for row in map(Wanted.model_validate, wanted)}
        for worker in list(self._app.workers.all):
            row = new.pop((worker.url, worker.group), None)
            if row is not None:
                worker.draining = row.draining
                if worker.leaving:
                    self._leaving.pop(worker).cancel()
                    worker.stay()
            elif not worker.leaving:
                worker.leave()
                self._leaving[worker] = asyncio.create_task(self._leave(worker))
        for row in new.values():
            self._app.workers.add(row.url, row.group)
            self._app.workers.all[-1].draining = row.draining

    async def _leave(self, worker: Worker) -> None:
        """Waits for what this process has on it, ends that at the limit, and forgets the worker."""
        if not await self._idle(worker, self._drain_seconds):
            log.warning("ending %d requests on %s, which was removed", len(self._requests(worker)), worker.url)
            for exchange in self._requests(worker):
                exchange.end(ApiError(Kind.WORKER_FAILED, "The worker was removed; send the request again."))
            await self._idle(worker, BREAK_OFF_SECONDS)
        self._leaving.pop(worker, None)
        await self._app.workers.remove(worker)
        log.info("worker %s is gone", worker.url)

    async def _idle(self, worker: Worker, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._requests(worker):  # noqa: ASYNC110 - one task in a great while
                    await asyncio.sleep(_LOOK_SECONDS)
        return not self._requests(worker)

    def _requests(self, worker: Worker) -> list[Any]:
        return [exchange for exchange in self._app.proxy.active if exchange.worker is worker]

    def _seen(self, worker: Worker) -> Seen:
        metrics = self._app.metrics
        requests = sum(series.value() for labels, series in metrics.requests.known() if labels[1] == worker.url)
        firsts = [series.totals() for labels, series in metrics.first_token.known() if labels[1] == worker.url]
        counts = [sum(column) for column in zip(*firsts, strict=True)][:-1]
        p50, p99 = (quantile(part, LONG, counts) for part in (0.5, 0.99))
        return Seen(
            url=worker.url,
            group=worker.group,
            ready=worker.ready,
            reason=worker.reason,
            experts=worker.experts.state,
            models=list(worker.models),
            outstanding=worker.outstanding.total(),
            requests=requests,
            ttft_ms_p50=None if p50 is None else round(1000 * p50, 1),
            ttft_ms_p99=None if p99 is None else round(1000 * p99, 1),
        )


async def reload_and_tell(reload: Callable[[], Awaitable[int | None]]) -> None:
    """What SIGHUP does, with its line in the log."""
    try:
        number = await reload()
    except ConfigError as error:
        log.error("SIGHUP: the old keys stay: %s", error)
    else:
        log.info("SIGHUP: %s", "nothing to reload, keys_file is not set" if number is None else f"{number} API keys")
