"""Prometheus metrics: a snapshot of the parts' own numbers at each scrape, in a registry of our own.

Owns names and help texts. Nothing is counted here; counters are the data plane's and never go back while the daemon
lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from syshax.protocol import ModelState, Priority
from syshaxd.session_totals import Totals
from syshaxd.status import Parts, Reporter, version


def metrics_text(parts: Parts, reporter: Reporter) -> tuple[bytes, str]:
    """What a scrape gets, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(parts, reporter))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class DaemonCollector(Collector):
    def __init__(self, parts: Parts, reporter: Reporter) -> None:
        self._parts, self._reporter = parts, reporter

    def collect(self) -> Iterator[Metric]:
        yield from self._daemon()
        yield from self._models()
        yield from self._cache()
        yield from self._nodes()
        yield from self._work()
        yield from self._classes()

    def _daemon(self) -> Iterator[Metric]:
        parts = self._parts
        yield InfoMetricFamily(
            "syshax_build",
            "Version, ISA in use, the best that the CPU has.",
            value={
                "version": version(),
                "isa": parts.core.isa_effective(parts.isa_cap),
                "isa_best": parts.core.isa_effective(""),
            },
        )
        age = parts.runtime.stats()["heartbeat_age_ns"] / 1e9
        yield _gauge("syshax_heartbeat_age_seconds", "Since the data plane's last turn; 0 while it sleeps.", age)
        yield _gauge("syshax_sessions", "Attached sessions.", len(parts.sessions))
        stale = sum(session.stale for session in parts.sessions)
        yield _gauge("syshax_sessions_stale", "Sessions whose process is stopped.", stale)
        shm = sum(session.shm_bytes for session in parts.sessions)
        yield _gauge("syshax_sessions_shared_memory_bytes", "Shared memory of all sessions.", shm)
        degraded = bool(self._reporter.troubles(parts.runtime.stats()))
        yield _gauge("syshax_degraded", "1: something configured does not work; status says what.", degraded)

    def _models(self) -> Iterator[Metric]:
        infos = self._parts.registry.infos()
        states = GaugeMetricFamily("syshax_models", "Models by state.", labels=["state"])
        for state in ModelState:
            states.add_metric([state.value], sum(info.state is state for info in infos))
        yield states
        progress = GaugeMetricFamily("syshax_load_progress_ratio", "Part of the layers loaded.", labels=["model"])
        chosen = GaugeMetricFamily("syshax_kernel_info", "Kernel of a model.", labels=["model", "dtype", "kernel"])
        calls = CounterMetricFamily("syshax_layer_requests", "Layers computed for a model.", labels=["model"])
        reads = CounterMetricFamily(
            "syshax_expert_reads", "Times that an expert's weights were read.", labels=["model"]
        )
        for info in infos:
            total = info.progress.layers_total
            progress.add_metric([info.name], info.progress.layers_done / total if total else 0.0)
            calls.add_metric([info.name], info.forward_calls)
            for dtype, kernel in info.kernels.items():
                chosen.add_metric([info.name, dtype.value, kernel], 1)
        for entry in self._parts.registry.entries():
            if entry.model is not None:
                reads.add_metric([entry.name], entry.model.expert_reads())
        yield from (progress, chosen, calls, reads)
        labels = ["model", "dtype", "kernel", "best"]
        worse = GaugeMetricFamily("syshax_kernel_not_best", "1: this CPU has a better kernel.", labels=labels)
        for name, _, ring_dtype, kernel, best in self._reporter.kernels_not_best():
            worse.add_metric([name, ring_dtype, kernel, best], 1)
        yield worse

    def _cache(self) -> Iterator[Metric]:
        """Counts alone: a scrape reads no disk."""
        loads = CounterMetricFamily("syshax_cache_loads", "Loads that looked into the packed cache.", labels=["result"])
        writes = CounterMetricFamily("syshax_cache_writes", "Models for the packed cache.", labels=["result"])
        for result, count in self._parts.cache.counts.items():
            (writes if result in ("written", "skipped") else loads).add_metric([result], count)
        yield from (loads, writes)

    def _nodes(self) -> Iterator[Metric]:
        nodes = self._reporter.nodes()
        rows = [
            ("syshax_pool_bytes", "Bytes of experts on a node.", [float(node.pool_bytes) for node in nodes]),
            ("syshax_pool_huge_bytes", "Those of them in huge pages.", [float(node.huge_bytes) for node in nodes]),
            ("syshax_node_free_bytes", "Free memory of a node.", [float(node.free_bytes) for node in nodes]),
            ("syshax_node_busy_ratio", "How much its threads computed lately.", [node.busy_fraction for node in nodes]),
            ("syshax_node_threads", "Threads of a node.", [float(node.threads) for node in nodes]),
        ]
        for name, help_text, values in rows:
            family = GaugeMetricFamily(name, help_text, labels=["node"])
            for node, value in zip(nodes, values, strict=True):
                family.add_metric([str(node.node)], value)
            yield family

    def _work(self) -> Iterator[Metric]:
        totals = self._parts.sessions.by_model()
        rows: list[tuple[str, str, dict[str, float]]] = [
            ("syshax_requests", "Requests of sessions.", {name: t.requests for name, t in totals.items()}),
            ("syshax_tokens", "Tokens in them.", {name: t.tokens for name, t in totals.items()}),
            (
                "syshax_request_errors",
                "Those that ended in an error.",
                {name: t.errors for name, t in totals.items()},
            ),
            ("syshax_compute_seconds", "Time in experts.", {name: t.compute_ns / 1e9 for name, t in totals.items()}),
            ("syshax_queue_seconds", "Time waiting.", {name: t.queued_ns / 1e9 for name, t in totals.items()}),
        ]
        for name, help_text, values in rows:
            family = CounterMetricFamily(name, help_text, labels=["model"])
            for model, value in values.items():
                family.add_metric([model], value)
            yield family

    def _classes(self) -> Iterator[Metric]:
        """By class: three label values, however many sessions come and go."""
        sessions = self._parts.sessions
        living, totals = Counter(session.priority for session in sessions), sessions.by_class()
        attached = GaugeMetricFamily("syshax_class_sessions", "Attached sessions of a class.", labels=["priority"])
        waits = GaugeMetricFamily(
            "syshax_class_wait_p99_seconds", "A request's wait for its start: worst session.", labels=["priority"]
        )
        worst = dict.fromkeys(Priority, 0.0)
        for info in sessions.infos():
            worst[info.priority] = max(worst[info.priority], info.wait_ms_p99 / 1e3)
        for priority in Priority:
            attached.add_metric([priority.value], living[priority])
            waits.add_metric([priority.value], worst[priority])
        yield from (attached, waits)
        rows: list[tuple[str, str, Callable[[Totals], float]]] = [
            ("syshax_class_requests", "Requests of a class.", lambda t: t.requests),
            ("syshax_class_tokens", "Tokens in them.", lambda t: t.tokens),
            ("syshax_class_request_errors", "Those that ended in an error.", lambda t: t.errors),
            ("syshax_class_compute_seconds", "Its part of the data plane's time.", lambda t: t.charged_ns / 1e9),
            ("syshax_class_queue_seconds", "Time between arrival and start.", lambda t: t.queued_ns / 1e9),
            ("syshax_class_throttled_seconds", "Waiting because a share was used up.", lambda t: t.throttled_ns / 1e9),
            ("syshax_class_batched", "Requests computed with another session's.", lambda t: t.batched),
        ]
        for name, help_text, value in rows:
            family = CounterMetricFamily(name, help_text, labels=["priority"])
            for priority in Priority:
                family.add_metric([priority.value], value(totals[priority]))
            yield family


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=float(value))
