"""Passes one request to a worker and its answer back, byte for byte, chunk by chunk as they come.

Who ends it: the worker's last byte; the client going away, which cancels the task and with it the worker's side; a
timeout or a shutdown, which are one clock here; a failing worker. Before the first byte of an answer a failure moves
the request to another worker once, after it a stream ends with an OpenAI error event, other answers by a cut
connection, never as if they were complete.
"""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
from aiohttp import web

from syshaxd.frontend import trace
from syshaxd.frontend.board import Board
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.errors import SERVER, ApiError, Kind, quoted
from syshaxd.frontend.keys import Key
from syshaxd.frontend.metrics import Metrics, Series
from syshaxd.frontend.pace import retry_after
from syshaxd.frontend.request import OUTSIDE_V1, headers_to_client, headers_to_worker, path_of, read_body
from syshaxd.frontend.routing import Ask, Router, priority_of
from syshaxd.frontend.tokens import Tokens
from syshaxd.frontend.workers import Worker, describe

log = logging.getLogger("syshax.api")
REQUEST_ID = "x-request-id"
IN_PROGRESS = "requests in progress"
"""The board's cell of requests that are passed on or wait."""
_SHARED_BODY = 1 << 20
"""Larger bodies go out in pieces instead of being copied whole into the transport's buffer."""
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
_FAILURES = (aiohttp.ClientError, OSError)


class _WorkerFailedError(Exception):
    """Before the first byte. `unsent`: it cannot have reached the worker."""

    def __init__(self, reason: str, unsent: bool) -> None:
        super().__init__(reason)
        self.unsent = unsent


@dataclass(eq=False)
class Exchange:
    """One request on its way. `end` stops it from outside with an error for the client."""

    request: web.BaseRequest
    request_id: str
    path: str
    target: str
    started: float
    key: Key | None
    body: bytes = b""
    ask: Ask | None = None
    worker: Worker | None = None
    response: web.StreamResponse | None = None
    clock: asyncio.Timeout | None = None
    error: ApiError | None = None
    priority: str = ""
    trace: str = ""
    """The trace id, where one was made here."""
    tokens: Tokens | None = None
    bytes_out: int = 0
    tail: bytes = b""
    """The last bytes passed, to know whether a stream stands at an event's end."""
    notes: list[str] = field(default_factory=list)

    def end(self, error: ApiError) -> None:
        self.error = error
        if self.clock is not None:
            self.clock.reschedule(0)


class Proxy:
    """All exchanges. `active` are those in progress."""

    def __init__(self, config: ApiConfig, router: Router, metrics: Metrics, board: Board) -> None:
        self._limits, self._timeouts, self._log_requests = config.limits, config.timeouts, config.logging.requests
        self._make_traces = config.tracing.make
        self._router = router
        self._metrics = metrics
        self._in_progress = board.cell(IN_PROGRESS)
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
        finally:
            self.active.discard(exchange)
            self._account(exchange, status)
            if not self.active and self.on_idle is not None:
                self.on_idle()

    async def _on_the_clock(self, exchange: Exchange) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._timeouts.first_byte_seconds) as exchange.clock:
                exchange.body = await read_body(exchange.request, self._limits.body)
                ask = self._router.ask(exchange.path, exchange.request.headers, exchange.body, exchange.key)
                exchange.ask = ask
                return await self._with_retry(exchange, ask)
        except TimeoutError:
            error = exchange.error = exchange.error or self._too_slow(exchange)
        exchange.notes.append(error.message)
        if exchange.response is None:
            raise error
        return await self._break_off(exchange, exchange.response, error)

    async def _with_retry(self, exchange: Exchange, ask: Ask) -> web.StreamResponse:
        worker = await self._router.take(ask)
        try:
            return await self._attempt(exchange, ask, worker)
        except _WorkerFailedError as failure:
            worker.mark_down(str(failure)) if failure.unsent else worker.suspect()
            exchange.notes.append(f"{worker.url}: {failure}")
            other = self._router.alternatives(ask, worker)
            if not self._may_repeat(exchange, failure) or (failure.unsent and not other):
                raise _failed(failure) from None
            self._metrics.retries.labels(worker.url).inc()
        second = self._router.take_again(ask, worker)
        try:
            return await self._attempt(exchange, ask, second)
        except _WorkerFailedError as failure:
            second.mark_down(str(failure)) if failure.unsent else second.suspect()
            exchange.notes.append(f"{second.url}: {failure}")
            raise _failed(failure) from None

    def _too_slow(self, exchange: Exchange) -> ApiError:
        first = f"{self._timeouts.first_byte_seconds:g} s"
        if exchange.ask is None:
            return ApiError(Kind.SLOW_BODY, f"The request's body did not arrive within {first}.")
        if exchange.worker is None:
            return ApiError(Kind.OVERLOADED, f"No worker had a place for this request within {first}.")
        limit = f"{self._timeouts.idle_seconds:g} s" if exchange.response else first
        return ApiError(Kind.TIMEOUT, f"The worker sent nothing for {limit}.")

    def _may_repeat(self, exchange: Exchange, failure: _WorkerFailedError) -> bool:
        return failure.unsent or exchange.request.method in ("GET", "HEAD") or exchange.path in _REPEATABLE

    async def _attempt(self, exchange: Exchange, ask: Ask, worker: Worker) -> web.StreamResponse:
        """`worker` holds a place for it, which is given back here."""
        exchange.worker = worker
        series = self._series(exchange)
        series.running.inc()
        upstream: aiohttp.ClientResponse | None = None
        try:
            upstream = await self._send(exchange, worker, self._router.bytes_for(ask, worker))
            first = await self._first_chunk(upstream)
            return await self._pass_on(exchange, upstream, first, series)
        finally:
            self._router.release(worker)
            series.running.dec()
            if upstream is not None:
                upstream.close()
            if exchange.tokens is not None:
                exchange.tokens.end()
                exchange.tokens = None

    async def _send(self, exchange: Exchange, worker: Worker, body: bytes) -> aiohttp.ClientResponse:
        request = exchange.request
        headers = headers_to_worker(request.headers)
        headers.setdefault(REQUEST_ID, exchange.request_id)
        if self._make_traces:
            exchange.trace = trace.begin(headers)
        data = body if len(body) <= _SHARED_BODY else io.BytesIO(body)
        try:
            return await worker.session.request(
                request.method,
                worker.target(exchange.target),
                headers=headers,
                data=data if body else None,
                allow_redirects=False,
            )
        except _FAILURES as error:
            unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError)
            raise _WorkerFailedError(describe(error), unsent) from None

    async def _first_chunk(self, upstream: aiohttp.ClientResponse) -> bytes | None:
        """The first chunk if it comes in time (b"": the body is empty); None: pass the headers on without it."""
        if not self._timeouts.hold_seconds:
            return None
        try:
            async with asyncio.timeout(self._timeouts.hold_seconds) as hold:
                return await upstream.content.readany()
        except _FAILURES as error:
            if isinstance(error, TimeoutError) and hold.expired():
                return None
            raise _WorkerFailedError(describe(error), unsent=False) from None

    async def _pass_on(
        self, exchange: Exchange, upstream: aiohttp.ClientResponse, first: bytes | None, series: Series
    ) -> web.StreamResponse:
        request, clock, idle = exchange.request, exchange.clock, self._timeouts.idle_seconds
        assert clock is not None
        made = web.StreamResponse if first is None else _WithFirstChunk
        response = made(status=upstream.status, reason=upstream.reason, headers=headers_to_client(upstream.headers))
        response.headers.setdefault(REQUEST_ID, exchange.request_id)
        response.headers.setdefault("Server", SERVER)
        if self.draining:
            response.force_close()
        exchange.response = response
        await response.prepare(request)
        streamed = is_event_stream(response)
        tokens = Tokens(series.prompt_tokens, series.generation_tokens, streamed)
        if upstream.status < 400:
            exchange.tokens = tokens
        loop = asyncio.get_running_loop()
        before = armed = 0.0
        while True:
            try:
                chunk = await upstream.content.readany() if first is None else first
            except _FAILURES as error:
                exchange.error = ApiError(
                    Kind.WORKER_FAILED, f"The worker failed while it answered: {describe(error)}."
                )
                exchange.notes.append(exchange.error.message)
                if exchange.worker is not None:
                    exchange.worker.suspect()
                return await self._break_off(exchange, response, exchange.error)
            first = None
            if not chunk:
                break
            now = loop.time()
            if now - armed > idle / 8 and exchange.error is None:
                clock.reschedule(now + idle)
                armed = now
            if streamed:
                (series.between_tokens.observe(now - before) if before else self._note_first(exchange, series))
                before = now
            exchange.bytes_out += len(chunk)
            exchange.tail = chunk[-4:] if len(chunk) >= 4 else (exchange.tail + chunk)[-4:]
            tokens.passed(chunk)
            await response.write(chunk)
        await response.write_eof()
        return response

    def _note_first(self, exchange: Exchange, series: Series) -> None:
        series.first_token.observe(monotonic() - exchange.started)

    async def _break_off(self, exchange: Exchange, response: web.StreamResponse, error: ApiError) -> web.StreamResponse:
        """Ends an answer that has begun so that nobody takes it for complete.

        After an error event the connection stays: a client that has read the whole answer may be sending its next
        request on it, which closing would lose.
        """
        if is_event_stream(response) and response.content_length is None:
            at_end = not exchange.tail or exchange.tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))
            event = (b"" if at_end else b"\n\n") + error.event()
            exchange.bytes_out += len(event)
            await response.write(event)
            await response.write_eof()
        elif (transport := exchange.request.transport) is not None:
            transport.abort()
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
        self._metrics.request(model, worker, status, exchange.priority).inc()
        series = self._metrics.series(model, worker, exchange.priority)
        series.whole.observe(seconds)
        series.bytes_in.inc(len(exchange.body))
        series.bytes_out.inc(exchange.bytes_out)
        if status == 499:
            self._metrics.disconnects.inc()
            exchange.notes.append("the client went away")
        if self._log_requests:
            facts = {
                "method": exchange.request.method,
                "path": quoted(exchange.path),
                "status": status,
                "request_id": quoted(exchange.request_id),
                "model": quoted((exchange.ask.body.model if exchange.ask else None) or "-"),
                "worker": worker or "-",
                "bytes_in": len(exchange.body),
                "bytes_out": exchange.bytes_out,
                "seconds": round(seconds, 4),
                **({"trace": traced} if (traced := exchange.trace or trace.trace_of(exchange.request.headers)) else {}),
                **({"note": "; ".join(exchange.notes)} if exchange.notes else {}),
            }
            log.info("request", extra=facts)


def _failed(failure: _WorkerFailedError) -> ApiError:
    return ApiError(Kind.WORKER_FAILED, f"The worker failed before it answered: {failure}.")


def _cut_short(error: BaseException) -> ApiError:
    return ApiError(Kind.WORKER_FAILED, f"The worker failed while it answered: {describe(error)}.")


class _WithFirstChunk(web.StreamResponse):
    """Its headers leave in one packet with the first chunk, which is at hand (aiohttp's own Response does the same)."""

    _send_headers_immediately = False


def is_event_stream(response: web.StreamResponse) -> bool:
    """Server-sent events that are not compressed, so that an event can be added."""
    kind = response.headers.get("Content-Type", "")
    return kind.lower().startswith("text/event-stream") and "Content-Encoding" not in response.headers
