"""Thread pools: pinned as planned or refused, as many as planned, asleep when idle, right under pressure."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import core_models as models
import numpy as np
import pytest
from core_models import geometry, load, plan

from syshaxd import _core

SHAPE = geometry(64, 128, experts=6, top_k=2)
CPUS = sorted(os.sched_getaffinity(0))


def pool_threads() -> dict[int, str]:
    """Id of each computing thread of this process -> its name, which pools that live at once share."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            name = (task / "comm").read_text().strip()
            if name.startswith("moe-"):
                found[int(task.name)] = name
    return found


def added(before: dict[int, str]) -> dict[str, set[int]]:
    """Name of each computing thread that was not there before -> the CPUs it may use."""
    found = {}
    for thread, name in pool_threads().items():
        with suppress(OSError):
            if thread not in before:
                found[name] = os.sched_getaffinity(thread)
    return found


def assert_gone(before: dict[int, str]) -> None:
    """No thread but those of before. The kernel lists one that was joined for an instant longer."""
    deadline = time.monotonic() + 5
    while added(before):
        assert time.monotonic() < deadline, added(before)
        time.sleep(0.001)


def call(loaded: models.Loaded, tokens: int = 5) -> None:
    ids, weights = models.routing(SHAPE, tokens, 2, seed=tokens)
    loaded.compare(0, models.hidden_states(SHAPE, tokens, seed=1), ids, weights, "float32")


def test_the_caller_is_the_first_thread() -> None:
    before = pool_threads()
    loaded = load(SHAPE, "q8_0", plan([1]))
    assert not added(before)
    call(loaded)
    del loaded
    loaded = load(SHAPE, "q8_0", plan([3, 2]))
    assert len(added(before)) == 4
    call(loaded)
    del loaded
    assert_gone(before)


def test_threads_run_where_the_plan_says() -> None:
    cpus = [CPUS[0], CPUS[-1], CPUS[0]]
    nodes = [
        {"node": -1, "cpus": cpus, "threads": 3, "share": 1.0},
        {"node": -1, "cpus": [CPUS[-1]], "threads": 1, "share": 1.0},
    ]
    before = pool_threads()
    loaded = load(SHAPE, "q8_0", nodes)
    call(loaded)
    seen = added(before)
    assert seen["moe-0-1"] == {CPUS[-1]}
    assert seen["moe-0-2"] == {CPUS[0]}
    assert seen["moe-1-0"] == {CPUS[-1]}


ONE = {"node": -1, "cpus": [CPUS[0]], "threads": 1, "share": 1.0}
BAD_PLANS = {
    "no node": ([], "no nodes"),
    "cpu": ([dict(ONE, cpus=[4095])], "CPU 4095.*errno 22"),
    "negative cpu": ([dict(ONE, cpus=[-1])], "CPU -1 does not exist"),
    "second node's cpu": ([ONE, dict(ONE, cpus=[4000])], "CPU 4000"),
    "more threads than cpus": ([dict(ONE, threads=2)], r"2 threads on 1 CPUs \(0\)"),
    "share without a thread": ([ONE, dict(ONE, threads=0)], "share but no thread"),
    "no share": ([dict(ONE, share=0.0)], "no node of the plan has a share"),
    "negative share": ([dict(ONE, share=-1.0)], "share -1"),
    "nan share": ([dict(ONE, share=float("nan"))], "share nan"),
    "first node without threads": ([dict(ONE, threads=0, share=0.0), ONE], "first node"),
    "numa node": ([dict(ONE, node=63)], "NUMA node 63 cannot be used; nodes with memory: 0"),
}


@pytest.mark.parametrize(("nodes", "message"), BAD_PLANS.values(), ids=BAD_PLANS.keys())
def test_plans_that_cannot_be_obeyed_are_refused(nodes: list[dict[str, Any]], message: str) -> None:
    before = pool_threads()
    with pytest.raises(_core.CoreError, match=message) as caught:
        _core.Runtime(nodes)
    assert caught.value.code == "hardware"
    assert_gone(before)


@pytest.mark.parametrize("missing", ["node", "cpus", "threads", "share"])
def test_incomplete_plans_name_the_field(missing: str) -> None:
    with pytest.raises(_core.CoreError, match=missing):
        _core.Runtime([{key: value for key, value in ONE.items() if key != missing}])


def test_a_real_node_can_be_bound() -> None:
    call(load(SHAPE, "q4_0", [dict(ONE, node=_core.topology()["nodes"][0]["node"])]))


def busy_seconds() -> float:
    times = os.times()
    return times.user + times.system


@pytest.mark.parametrize("spin_us", [0, 50, 2000])
def test_idle_threads_sleep(spin_us: int) -> None:
    loaded = load(SHAPE, "q8_0", plan([2, 2]), spin_us=spin_us)
    call(loaded)
    time.sleep(0.05)
    before = busy_seconds()
    time.sleep(1.0)
    assert busy_seconds() - before <= 0.02
    call(loaded)


@pytest.mark.parametrize("spin_us", [0, 20, 1000, 1 << 31 | 20])
@pytest.mark.parametrize("cpus", [[], [CPUS[0]], CPUS], ids=["unpinned", "one", "all"])
@pytest.mark.parametrize("threads", [[2], [5, 4, 3]], ids=str)
def test_threads_on_few_cpus_stay_right(spin_us: int, cpus: list[int], threads: list[int]) -> None:
    nodes = [{**node, "cpus": (cpus * node["threads"])[: node["threads"]]} for node in plan(threads)]
    loaded = load(SHAPE, "q8_0", nodes, spin_us=spin_us)
    for tokens in (1, 3, 40, 2, 90, 1) * 2:
        call(loaded, tokens)


def test_calls_from_several_threads_take_turns() -> None:
    loaded = load(SHAPE, "bf16", plan([2, 1]))
    ids, weights = models.routing(SHAPE, 9, 2, seed=0)
    x = models.hidden_states(SHAPE, 9, seed=0)
    want = loaded.compare(0, x, ids, weights, "float32")
    wrong: list[int] = []

    def hammer(number: int) -> None:
        for _ in range(30):
            if not np.array_equal(loaded.model.forward(0, x, ids, weights, "float32"), want):
                wrong.append(number)

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert loaded.model.forward_calls() == 121


def test_dropping_while_computing_waits_for_the_call() -> None:
    for _ in range(10):
        loaded = load(SHAPE, "q8_0", plan([2]))
        refused: list[str] = []

        def hammer(loaded: models.Loaded = loaded, refused: list[str] = refused) -> None:
            ids, weights = models.routing(SHAPE, 64, 2, seed=0)
            x = models.hidden_states(SHAPE, 64, seed=0)
            while not refused:
                try:
                    loaded.model.forward(0, x, ids, weights, "float32")
                except _core.CoreError as error:
                    refused.append(error.code)

        thread = threading.Thread(target=hammer)
        thread.start()
        time.sleep(0.005)
        loaded.runtime.drop_model(loaded.model)
        thread.join()
        assert refused == ["model_not_ready"]
