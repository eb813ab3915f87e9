"""Twice ten seconds of the storm (`make storm` runs minutes of it), and that its judgement sees what it must see."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from storm import Fault, Request, Storm, judge
from storm_worker import DONE, event


@pytest.mark.timeout(120)
@pytest.mark.parametrize("processes", [1, 2])
async def test_workers_killed_stopped_and_restarted_under_load_lose_no_request_that_could_be_saved(
    processes: int,
) -> None:
    storm = Storm(seconds=10, seed=3, processes=processes)
    wrong = await storm.run()
    print(storm.summary())
    assert not wrong, "\n".join(wrong[:10])
    assert {fault.kind for fault in storm.faults} >= {"kill", "stop"} and len(storm.faults) >= 4
    assert sum(request.outcome == "right" for request in storm.requests) > 100
    assert any(request.outcome == "worker_failed" for request in storm.requests), "the faults reached requests"


ASKED = Request(7, True, "chat/completions", 3, 0.0, None, begin=10.0, end=11.0)
KILLED = Fault("kill", 0, 10.5, 12.0)


@pytest.mark.parametrize(
    ("outcome", "some", "faults", "broken"),
    [
        ("right", True, [], ""),
        ("worker_failed", True, [KILLED], ""),
        ("worker_failed", True, [], "although no worker was killed"),
        ("worker_failed", False, [KILLED], "another worker could have answered"),
        ("worker_failed", False, [KILLED, Fault("kill", 1, 10.6, 12.0)], ""),
        ("not_ready", False, [KILLED, Fault("stop", 1, 10.6, 12.0)], "a worker was up"),
        ("not_ready", False, [Fault("kill", n, 10.5, 12.0) for n in range(3)], ""),
        ("worker_timeout", True, [KILLED], "no worker was stopped"),
        ("internal_error", False, [KILLED], "unexpected end"),
    ],
)
def test_the_judgement_of_an_outcome(outcome: str, some: bool, faults: list[Fault], broken: str) -> None:
    why = judge(replace(ASKED, outcome=outcome, some=some), faults)
    assert broken in why and bool(why) == bool(broken)


ERROR = b'data: {"error": {"message": "m", "type": "t", "param": null, "code": "worker_failed"}}\n\n'
WHOLE = b"".join(event(7, number) for number in range(3))


@pytest.mark.parametrize(
    ("content", "outcome", "fault"),
    [
        (WHOLE + DONE, "right", ""),
        (WHOLE, "right", "without notice"),
        (WHOLE + ERROR, "worker_failed", ""),
        (ERROR, "worker_failed", ""),
        (WHOLE[:70] + b"\n\n" + ERROR, "worker_failed", ""),
        (WHOLE[:7] + b"\n\n" + ERROR, "worker_failed", ""),
        (event(7, 0) + event(7, 2) + DONE, "right", "without notice"),
        (event(7, 1) + ERROR, "worker_failed", "wrong before its error"),
        (WHOLE + ERROR.replace(b"param", b"parma"), "worker_failed", "a bad error object"),
    ],
)
def test_the_judgement_of_a_stream(content: bytes, outcome: str, fault: str) -> None:
    request = replace(ASKED, faults=[])
    Storm(1, 1)._check_stream(request, content)
    assert request.outcome == outcome and fault in "; ".join(request.faults) and bool(request.faults) == bool(fault)


def test_any_cut_of_a_stream_with_its_error_is_taken_for_what_it_is() -> None:
    for place in random.Random(1).sample(range(len(WHOLE)), 60):
        request = replace(ASKED, faults=[])
        cut = WHOLE[:place]
        Storm(1, 1)._check_stream(request, cut + (b"" if not cut or cut.endswith(b"\n\n") else b"\n\n") + ERROR)
        assert (request.outcome, request.faults) == ("worker_failed", []), place
