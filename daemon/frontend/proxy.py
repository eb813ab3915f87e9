"""Passes one request to a worker and its answer back, byte for byte (`relay`: part by part as they come).

Who ends it: the worker's last byte; the client going away, which cancels the task and with it the worker's side; a
timeout or a shutdown, which are one clock here; a failing worker. Before the first byte of an answer a failure moves
the request to another worker once, after it a stream ends with an OpenAI error event, other answers by a cut
connection, never as if they were complete.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from aiohttp import web

from syshaxd.frontend import trace
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.errors import SERVER, ApiError, Kind, internal, quoted
from syshaxd.frontend.keys import Key
from syshaxd.frontend.metrics import Metrics, Series
from syshaxd.frontend.pace import retry_after
from syshaxd.frontend.relay import HeldHead, Relay
from syshaxd.frontend.request import OUTSIDE_V1, headers_to_worker, path_of, read_body
from syshaxd.frontend.routing import Ask, Router, priority_of
from syshaxd.frontend.upstream import Answer, WorkerError
from syshaxd.frontend.workers import Worker

log = logging.getLogger("syshax.api")
REQUEST_ID = "x-request-id"
WORKER = "x-syshax-worker"
"""Which worker answered, by a name that tells nothing of its address."""
_SMALL_BODY = 1 << 16
"""Up to here a body costs no more than its connection."""
IN_PROGRESS = "requests in progress"
"""The board's cell of requests that are passed on or wait."""
_REPEATABLE = OUTSIDE_V1.union(
    f"/v1/{name}"
    for name in (
        "chat/completions",
        "completions",
        "embeddings",
        "rerank",
        "score",
        "classify",
        "pooling",
        "audio/transcriptions",
    )
)
"""POST routes that keep nothing, so that a request cut short may be sent again."""


@dataclass(eq=False, slots=True)
class Exchange:
    """One request on its way. `end` stops it from outside with an error for the client."""

    request: web.BaseRequest
    request_id: str
    path: str
    target: str
    started: float
    key: Key | None
    bytes_in: int = 0
    held: int = 0
    """Bytes of its body that count for limits.bodies."""
    ask: Ask | None = None
    worker: Worker | None = None
    relay: Relay | None = None
    """Set when an answer has begun."""
    clock: asyncio.Timeout | None = None
    error: ApiError | None = None
    priority: str = ""
    trace: str = ""
    """The trace id, where one was made here."""
    notes: list[str] = field(default_factory=list)

    def end(self, error: ApiError) -> None:
        self.error = error
        if self.clock is not None and not self.clock.expired():
            self.clock.reschedule(0)

    def goes_on(self, seconds: float) -> None:
        """Something has come: the clock runs for so long again."""
        if self.error is None and self.clock is not None and not self.clock.expired():
            self.clock.reschedule(asyncio.get_running_loop().time() + seconds)


class Proxy:
    """All exchanges. `active` are those in progress."""

    def __init__(self, config: ApiConfig, router: Router, metrics: Metrics, board: Board) -> None:
        self._limits, self._timeouts, self._log_requests = config.limits, config.timeouts, config.logging.requests
        self._make_traces = config.tracing.make
        self._router = router
        self._metrics = metrics
        self._in_progress = board.cell(IN_PROGRESS)
        self._bodies = board.cell("bytes of bodies")
        self.active: set[Exchange] = set()
        self.draining = False
        """Answers from now on tell their connection's end."""
        self.on_idle: Callable[[], None] | None = None

    async def forward(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        """The worker's answer, already sent. Raises `ApiError` when nothing has been sent."""
        self._in_progress.add(1)
        try:
            self._admit(key)
            return await self._forward(request, key)
        finally:
            self._in_progress.add(-1)

    def _admit(self, key: Key | None) -> None:
        try:
            if self._in_progress.total() > self._limits.requests:
                raise ApiError(
                    Kind.OVERLOADED,
                    f"{self._limits.requests} requests are in progress, the limit (limits.requests); try again later.",
                    headers=retry_after(1, self._router.pace(), 1.0),
                )
            if key is not None:
                key.admit()
        except ApiError as error:
            self._metrics.request("", "", error.kind.status, priority_of(key)).inc()
            raise

    async def _forward(self, request: web.BaseRequest, key: Key | None) -> web.StreamResponse:
        path, target = path_of(request)
        request_id = request.headers.get(REQUEST_ID) or secrets.token_hex(16)
        exchange = Exchange(request, request_id, path, target, monotonic(), key, priority=priority_of(key))
        self.active.add(exchange)
        status = 499
        try:
            response = await self._on_the_clock(exchange)
            status = exchange.error.kind.status if exchange.error else response.status
            return response
        except ApiError as error:
            status = error.kind.status
            error.headers += ((REQUEST_ID, request_id),)
            raise
        except ConnectionError:
            raise
        except Exception:
            status = Kind.INTERNAL.status
            exchange.notes.append("an internal error")
            if exchange.relay is None or not request.writer.output_size:
                raise
            log.exception("%s %s failed within its answer", request.method, quoted(path))
            await exchange.relay.break_off(internal().event())
            return exchange.relay.response
        finally:
            self.active.discard(exchange)
            self._let_go(exchange)
            self._account(exchange, status)
            if not self.active and self.on_idle is not None:
                self.on_idle()

    def _hold(self, exchange: Exchange, size: int) -> None:
        """Counts the body's memory as `size` from now on. `ApiError` 429 when that is too much with all others."""
        size = size if size > _SMALL_BODY else 0
        grown = size - exchange.held
        if not grown:
            return
        exchange.held = size
        self._bodies.add(grown)
        if grown > 0 and self._bodies.total() > self._limits.bodies:
            raise ApiError(
                Kind.OVERLOADED,
                "The bodies of the requests that wait for an answer take all memory that is set aside for them "
                "(limits.bodies); try again later.",
                headers=retry_after(1, self._router.pace(), 1.0),
            )

    def _let_go(self, exchange: Exchange) -> None:
        """The body is not sent again: its memory goes, even where an error's traceback still holds the exchange."""
        if exchange.ask is not None:
            exchange.ask.body.forget()
        self._hold(exchange, 0)

    async def _on_the_clock(self, exchange: Exchange) -> web.StreamResponse:
        first, request = self._timeouts.first_byte_seconds, exchange.request
        comes = request.can_read_body and not request.content.is_eof()
        try:
            async with asyncio.timeout(min(first, self._timeouts.body_seconds) if comes else first) as exchange.clock:
                body = await read_body(request, self._limits.body, lambda size: self._hold(exchange, size))
                exchange.bytes_in = len(body)
                self._hold(exchange, exchange.bytes_in)
                if comes:
                    exchange.goes_on(first)
                ask = self._router.ask(exchange.path, exchange.request.headers, body, exchange.key)
                del body
                exchange.ask = ask
                return await self._with_retry(exchange, ask)
        except TimeoutError:
            error = exchange.error = exchange.error or self._too_slow(exchange)
        exchange.notes.append(error.message)
        if exchange.relay is None:
            raise error
        await exchange.relay.break_off(error.event())
        return exchange.relay.response

    async def _with_retry(self, exchange: Exchange, ask: Ask) -> web.StreamResponse:
        worker = await self._router.take(ask)
        try:
            return await self._attempt(exchange, ask, worker)
        except WorkerError as failure:
            worker.mark_down(str(failure)) if failure.unsent else worker.suspect()
            exchange.notes.append(f"{worker.url}: {failure}")
            other = self._router.alternatives(ask, worker)
            if not self._may_repeat(exchange, failure) or (failure.unsent and not other):
                raise _failed(failure) from None
            self._metrics.retries.labels(worker.url).inc()
        second = self._router.take_again(ask, worker)
        try:
            return await self._attempt(exchange, ask, second)
        except WorkerError as failure:
            second.mark_down(str(failure)) if failure.unsent else second.suspect()
            exchange.notes.append(f"{second.url}: {failure}")
            raise _failed(failure) from None

    def _too_slow(self, exchange: Exchange) -> ApiError:
        first = f"{self._timeouts.first_byte_seconds:g} s"
        if exchange.ask is None:
            seconds = min(self._timeouts.first_byte_seconds, self._timeouts.body_seconds)
            return ApiError(Kind.SLOW_BODY, f"The request's body did not arrive within {seconds:g} s.")
        if exchange.worker is None:
            return ApiError(Kind.OVERLOADED, f"No worker had a place for this request within {first}.")
        limit = f"{self._timeouts.idle_seconds:g} s" if exchange.relay else first
        if exchange.relay and exchange.relay.full:
            return ApiError(Kind.SLOW_CLIENT, f"The client read nothing for {limit}.")
        return ApiError(Kind.TIMEOUT, f"The worker sent nothing for {limit}.")

    def _may_repeat(self, exchange: Exchange, failure: WorkerError) -> bool:
        return failure.unsent or exchange.request.method in ("GET", "HEAD") or exchange.path in _REPEATABLE

    async def _attempt(self, exchange: Exchange, ask: Ask, worker: Worker) -> web.StreamResponse:
        """`worker` holds a place for it, which is given back here."""
        exchange.worker = worker
        series = self._series(exchange)
        series.running.inc()
        answer: Answer | None = None
        try:
            answer = await self._send(exchange, worker, self._router.bytes_for(ask, worker))
            begun = await answer.begin(self._timeouts.hold_seconds)
            self._let_go(exchange)
            return await self._pass_on(exchange, answer, HeldHead if begun else web.StreamResponse, series)
        finally:
            self._router.release(worker)
            series.running.dec()
            if answer is not None:
                answer.close()
            if exchange.relay is not None:
                exchange.relay.close()

    async def _send(self, exchange: Exchange, worker: Worker, body: bytes) -> Answer:
        request = exchange.request
        added = [] if REQUEST_ID in request.headers else [(REQUEST_ID, exchange.request_id)]
        without: tuple[str, ...] = ()
        if self._make_traces:
            context = {name: request.headers[name] for name in trace.NAMES if name in request.headers}
            exchange.trace = trace.begin(context)
            added += context.items()
            without = trace.NAMES
        if exchange.key is not None or worker.authorization:
            without = (*without, "authorization")
            if worker.authorization:
                added.append(("Authorization", worker.authorization))
        headers = headers_to_worker(request, *added, without=without)
        return await worker.upstream.send(request.method, exchange.target, headers, body)

    async def _pass_on(
        self, exchange: Exchange, answer: Answer, made: type[web.StreamResponse], series: Series
    ) -> web.StreamResponse:
        response = made(status=answer.status, reason=answer.reason, headers=answer.headers)
        response.headers.setdefault(REQUEST_ID, exchange.request_id)
        if exchange.worker is not None:
            response.headers[WORKER] = exchange.worker.name
        response.headers.setdefault("Server", SERVER)
        if self.draining:
            response.force_close()
        relay = exchange.relay = Relay(answer, response, exchange.request, series, exchange.started)
        idle = self._timeouts.idle_seconds
        relay.tell(lambda: exchange.goes_on(idle), idle / 8)
        await relay.run()
        if answer.error is not None:
            error = exchange.error = ApiError(
                Kind.WORKER_FAILED, f"The worker failed while it answered: {answer.error}."
            )
            exchange.notes.append(error.message)
            if exchange.worker is not None:
                exchange.worker.suspect()
            await relay.break_off(error.event())
        return response

    def _series(self, exchange: Exchange) -> Series:
        model, worker = self._labels(exchange)
        return self._metrics.series(model, worker, exchange.priority)

    def _labels(self, exchange: Exchange) -> tuple[str, str]:
        worker = exchange.worker
        if worker is None:
            return "", ""
        model = exchange.ask.model if exchange.ask else None
        return (model if model in worker.models else "") or "", worker.url

    def _account(self, exchange: Exchange, status: int) -> None:
        model, worker = self._labels(exchange)
        seconds = monotonic() - exchange.started
        bytes_out = exchange.relay.bytes_out if exchange.relay else 0
        self._metrics.request(model, worker, status, exchange.priority).inc()
        series = self._metrics.series(model, worker, exchange.priority)
        series.whole.observe(seconds)
        series.bytes_in.inc(exchange.bytes_in)
        series.bytes_out.inc(bytes_out)
        if status == 499:
            self._metrics.disconnects.inc()
            exchange.notes.append("the client went away")
        if self._log_requests and log.isEnabledFor(logging.INFO):
            facts = {
                "method": exchange.request.method,
                "path": quoted(exchange.path),
                "status": status,
                "request_id": quoted(exchange.request_id),
                "model": quoted((exchange.ask.body.model if exchange.ask else None) or "-"),
                "worker": worker or "-",
                "bytes_in": exchange.bytes_in,
                "bytes_out": bytes_out,
                "seconds": round(seconds, 4),
                **({"trace": traced} if (traced := exchange.trace or trace.trace_of(exchange.request.headers)) else {}),
                **({"note": "; ".join(exchange.notes)} if exchange.notes else {}),
            }
            # As log.info does, but for finding the caller, which costs as much again.
            log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, "request", (), None, extra=facts))


def _failed(failure: WorkerError) -> ApiError:
    return ApiError(Kind.WORKER_FAILED, f"The worker failed before it answered: {failure}.")
