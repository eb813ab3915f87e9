"""schemathesis against the front-end's own routes: requests made from /openapi.json, answers held against it.

It tries every route with generated input, with and without the key, with wrong methods and content types.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from front_fixtures import FakeWorker, running_front, write_keys
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS, load_all_checks

from syshaxd.frontend.app import MODEL_ROUTE, OPEN_PATHS, ROUTES, App
from syshaxd.frontend.openapi import describe

KEY = "sk-schema"
DESCRIBED = describe({**ROUTES, "/v1/models/{model}": MODEL_ROUTE}, OPEN_PATHS, App.forward)
SECONDS = 20.0
schema = schemathesis.openapi.from_dict(DESCRIBED)
load_all_checks()
# What a body may hold is the worker's business, so that no JSON is "negative data" here.
NAMES = [name for name in CHECKS.get_all_names() if name not in ("negative_data_rejection", "positive_data_acceptance")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A front-end and a worker in a thread of their own, since schemathesis calls from a loop-less one."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys", {KEY: {}})
    started: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    leave = asyncio.Event()

    async def run() -> None:
        worker = FakeWorker("m")
        await worker.start()
        async with running_front(worker.url, keys=keys) as front:
            await front.until_ready(1)
            started.append(front.url)
            ready.set()
            await leave.wait()
        await worker.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(20)
    yield started[0]
    loop.call_soon_threadsafe(leave.set)
    thread.join(20)
    loop.close()


@pytest.fixture(scope="module")
def began() -> float:
    return time.monotonic()


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_route_answers_as_it_is_described(case: Any, url: str, began: float) -> None:
    if time.monotonic() - began > SECONDS:
        return
    checks = [CHECKS.get_one(name) for name in NAMES]
    case.call_and_validate(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, checks=checks, timeout=10)


def test_the_description_is_served_behind_the_key_and_names_every_route(url: str) -> None:
    assert requests.get(f"{url}/openapi.json", timeout=10).status_code == 401
    served = requests.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}, timeout=10)
    assert served.json() == DESCRIBED
    for path, methods in ROUTES.items():
        assert {method.lower() for method in methods} == set(DESCRIBED["paths"][path])
    closed = [path for path, methods in DESCRIBED["paths"].items() for m in methods.values() if m.get("security")]
    assert set(DESCRIBED["paths"]) - set(closed) == OPEN_PATHS


def test_a_wrong_answer_is_noticed(url: str) -> None:
    """The checks do see a fault: a description that the front-end does not keep."""
    wrong: dict[str, Any] = copy.deepcopy(DESCRIBED)
    ok = wrong["paths"]["/health"]["get"]["responses"]["200"]
    ok["content"]["application/json"]["schema"]["properties"]["status"] = {"const": "fine"}
    case = schemathesis.openapi.from_dict(wrong)["/health"]["GET"].Case()
    with pytest.raises(BaseException, match="fine"):
        case.call_and_validate(base_url=url, timeout=10)
