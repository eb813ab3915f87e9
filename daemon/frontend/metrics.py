"""Prometheus metrics of the front-end, in a registry of its own; label sets are resolved once and kept.

Names are vLLM's where the meaning is the same, so that dashboards made for vLLM show the front-end as well; else they
begin with syshax_api_. Label `model_name` holds only names that a worker serves, so that clients cannot add series; the
worker's label is its configured URL, `priority` that of the key. The numbers are those of all processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from syshaxd.frontend.board import Board
from syshaxd.frontend.instruments import Counter, Gauge, Histogram, Instruments

CONTENT_TYPE = CONTENT_TYPE_LATEST
NO_KEY = "normal"
"""The priority of requests without a key."""
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
"""Buckets of seconds."""
_LABELS = ("model_name", "worker", "priority")


@dataclass(frozen=True)
class Series:
    """The instruments of one (model, worker, priority)."""

    running: Gauge
    first_token: Histogram
    between_tokens: Histogram
    whole: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    bytes_in: Counter
    bytes_out: Counter


@dataclass(frozen=True)
class QueueSeries:
    """The instruments of one (model, priority): no worker has been chosen yet."""

    waiting: Gauge
    seconds: Histogram


class Metrics:
    """Everything that /metrics shows."""

    def __init__(self, board: Board) -> None:
        self.registry = CollectorRegistry()
        made = Instruments(board)
        self.learn = made.learn
        """Before series are read that other processes may have made."""
        self.registry.register(made)
        self.running = made.gauge("vllm:num_requests_running", "Requests that a worker is answering.", _LABELS)
        self.waiting = made.gauge("vllm:num_requests_waiting", "Requests that wait for a worker.", _LABELS)
        self.queue_time = made.histogram(
            "vllm:request_queue_time_seconds", "Waiting for a worker, of requests that got one.", _LABELS, LONG
        )
        self.first_token = made.histogram(
            "vllm:time_to_first_token_seconds", "Of streams: from arrival to the first chunk.", _LABELS, LONG
        )
        self.between_tokens = made.histogram(
            "vllm:inter_token_latency_seconds", "Of streams: between chunks.", _LABELS, SHORT
        )
        self.whole = made.histogram("vllm:e2e_request_latency_seconds", "From arrival to the last byte.", _LABELS, LONG)
        self.prompt_tokens = made.counter("vllm:prompt_tokens", "Of answers that tell their usage.", _LABELS)
        self.generation_tokens = made.counter(
            "vllm:generation_tokens", "By usage; of streams without it: their events.", _LABELS
        )
        self.requests = made.counter(
            "syshax_api_requests", "Requests by outcome.", ("model_name", "worker", "priority", "status")
        )
        self._bytes_in = made.counter("syshax_api_request_bytes", "Bytes of request bodies.", _LABELS)
        self._bytes_out = made.counter("syshax_api_response_bytes", "Bytes of answers.", _LABELS)
        self.retries = made.counter(
            "syshax_api_retries", "Requests sent again, by the worker that failed.", ("worker",)
        )
        self.disconnects = made.counter(
            "syshax_api_client_disconnects", "Requests whose client went away first."
        ).labels()
        self.worker_ready = made.opinion("syshax_api_worker_ready", "1: gets requests; 0: does not.", ("worker",))
        self.worker_experts = made.opinion(
            "syshax_api_worker_experts", "1: attached; 0: missing; no series: not known.", ("worker",)
        )
        self.daemon_seen = made.opinion("syshax_api_daemon_seen", "1: syshaxd's view socket answers.").labels()
        self.series = cache(self._series)
        self.queue = cache(self._queue)
        self.request = cache(self._request)

    def _series(self, model: str, worker: str, priority: str = NO_KEY) -> Series:
        labels = (model, worker, priority)
        return Series(
            self.running.labels(*labels),
            self.first_token.labels(*labels),
            self.between_tokens.labels(*labels),
            self.whole.labels(*labels),
            self.prompt_tokens.labels(*labels),
            self.generation_tokens.labels(*labels),
            self._bytes_in.labels(*labels),
            self._bytes_out.labels(*labels),
        )

    def _queue(self, model: str, priority: str = NO_KEY) -> QueueSeries:
        labels = (model, "", priority)
        return QueueSeries(self.waiting.labels(*labels), self.queue_time.labels(*labels))

    def _request(self, model: str, worker: str, status: int, priority: str = NO_KEY) -> Counter:
        return self.requests.labels(model, worker, priority, str(status))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
