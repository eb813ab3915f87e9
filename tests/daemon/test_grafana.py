"""etc/grafana-syshax.json: every query names metrics and labels that front-end or daemon export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from conftest import Daemon
from prometheus_client.parser import text_string_to_metric_families

from syshaxd.frontend.board import Board
from syshaxd.frontend.metrics import Metrics

BOARD = Path(__file__).resolve().parents[2] / "etc" / "grafana-syshax.json"
_NAME = re.compile(r"\b(?:vllm:|syshax_)[a-z0-9_:]+")
_SELECTOR = re.compile(r"((?:vllm:|syshax_)[a-z0-9_:]+)\{([^}]*)\}")
_BY = re.compile(r"by \(([^)]*)\)")


def frontend_text() -> str:
    metrics = Metrics(Board())
    metrics.series("m", "w").first_token.observe(1.0)
    metrics.queue("m").waiting.inc()
    metrics.request("m", "w", 200).inc()
    for family in (metrics.retries, metrics.worker_ready, metrics.worker_experts):
        family.labels("w")
    metrics.worker_ready.labels("w").set(1)
    metrics.worker_experts.labels("w").set(1)
    metrics.daemon_seen.set(1)
    return metrics.render().decode()


def labels_by_name(text: str) -> dict[str, set[str]]:
    return {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }


async def test_every_query_names_what_there_is(daemon: Daemon) -> None:
    connection, _, _ = await daemon.attach({"model": "tiny", "max_tokens": 1})
    _, _, body = await daemon.http("GET", "/metrics")
    connection.close()
    known = labels_by_name(frontend_text()) | labels_by_name(body.decode())
    board = json.loads(BOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    assert len(queries) > 20
    for query in queries:
        names = set(_NAME.findall(query))
        assert names and names <= known.keys(), query
        labels = set().union(*(known[name] for name in names))
        for _, selector in _SELECTOR.findall(query):
            assert {part.split("=")[0].rstrip("!") for part in selector.split(",")} <= labels, query
        for group in _BY.findall(query):
            assert {word.strip() for word in group.split(",")} <= labels, query


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    board = json.loads(BOARD.read_text())
    places: dict[tuple[int, int], Any] = {}
    for panel in board["panels"]:
        area = panel["gridPos"]
        for x in range(area["x"], area["x"] + area["w"]):
            for y in range(area["y"], area["y"] + area["h"]):
                assert x < 24 and places.setdefault((x, y), panel["title"]) == panel["title"]
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))
