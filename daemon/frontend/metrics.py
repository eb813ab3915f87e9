"""Prometheus metrics of the front-end, in a registry of its own; label sets are resolved once and kept.

Label `model` holds only names that a worker serves, so that clients cannot add series; the worker's label is its
configured URL. The numbers are those of all processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from syshaxd.frontend.board import Board
from syshaxd.frontend.instruments import Counter, Gauge, Histogram, Instruments

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)


@dataclass(frozen=True)
class Series:
    """The instruments of one (model, worker)."""

    in_flight: Gauge
    first_byte: Histogram
    between_chunks: Histogram
    duration: Histogram
    bytes_in: Counter
    bytes_out: Counter


class Metrics:
    """Everything that /metrics shows."""

    def __init__(self, board: Board) -> None:
        self.registry = CollectorRegistry()
        made = Instruments(board)
        self.registry.register(made)
        labels = ("model", "worker")
        self._requests = made.counter("syshax_api_requests", "Requests by outcome.", ("model", "worker", "status"))
        self._in_flight = made.gauge("syshax_api_requests_in_flight", "Requests passed on now.", labels)
        self._first_byte = made.histogram(
            "syshax_api_time_to_first_token_seconds",
            "From a streamed request's arrival to its answer's first chunk.",
            labels,
            _LONG,
        )
        self._between = made.histogram(
            "syshax_api_inter_chunk_seconds", "Between chunks of a streamed answer.", labels, _SHORT
        )
        self._duration = made.histogram(
            "syshax_api_request_duration_seconds", "From arrival to the last byte.", labels, _LONG
        )
        self._bytes_in = made.counter("syshax_api_request_bytes", "Bytes of request bodies.", labels)
        self._bytes_out = made.counter("syshax_api_response_bytes", "Bytes of answers.", labels)
        self.retries = made.counter(
            "syshax_api_retries", "Requests sent again, by the worker that failed.", ("worker",)
        )
        self.disconnects = made.counter(
            "syshax_api_client_disconnects", "Requests whose client went away first."
        ).labels()
        self.worker_ready = made.opinion("syshax_api_worker_ready", "1: gets requests; 0: does not.", ("worker",))
        self.series = cache(self._series)
        self.request = cache(self._request)

    def _series(self, model: str, worker: str) -> Series:
        return Series(
            self._in_flight.labels(model, worker),
            self._first_byte.labels(model, worker),
            self._between.labels(model, worker),
            self._duration.labels(model, worker),
            self._bytes_in.labels(model, worker),
            self._bytes_out.labels(model, worker),
        )

    def _request(self, model: str, worker: str, status: int) -> Counter:
        return self._requests.labels(model, worker, str(status))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
