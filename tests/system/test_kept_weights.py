"""Weights that outlive the daemon under a real systemd: rounds of crashes, an orderly restart, what the store holds."""

from __future__ import annotations

import json
import random
import time

import pytest
from box import Box
from conftest import Answers

DAEMON = "syshaxd.service"
KEPT = "tiny serves on"


def stored(box: Box) -> int:
    return int(box.show(DAEMON, "NFileDescriptorStore"))


def origin(box: Box, model: str = "tiny") -> str:
    models = json.loads(box.run("syshaxctl", "--json", "models"))["models"]
    return next(str(found["origin"]) for found in models if found["name"] == model)


def test_the_store_holds_what_is_loaded(box: Box) -> None:
    box.wait_ready()
    assert stored(box) == 2, "one arena, one manifest"
    box.run("syshaxctl", "load", "/srv/models/tiny", "--name", "second", "--format", "q8_0", "--wait")
    assert stored(box) == 4
    box.systemctl("restart", DAEMON)
    assert (origin(box), origin(box, "second")) == ("restart", "restart"), "the second one by no configuration"
    box.run("syshaxctl", "unload", "second")
    box.wait("an emptier store", lambda: stored(box) == 2, 10)


def test_syshaxctl_restart_drains_and_waits_for_the_next_daemon(box: Box, answers: Answers) -> None:
    box.wait_ready()
    client = answers.start(requests=60, pause=0.05)
    client.wait_for("answer 2")
    status, said = box.try_run("syshaxctl", "restart", "--drain", user="alice")
    assert status == 4 and "syshax-admin" in said
    pid = box.main_pid()
    said = box.run("syshaxctl", "restart", "--drain", user="bob")
    assert f"serves again (pid {box.main_pid()}): 1 models were kept" in said and box.main_pid() != pid
    assert box.show(DAEMON, "Result") == "success"
    client.check(60)


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3000)])])
def test_rounds_of_crashes_lose_no_request_and_no_weights(box: Box, answers: Answers, rounds: int) -> None:
    """kill -9 at any moment. READY comes with the model: it is in the first status line of every new daemon."""
    box.drop_in(DAEMON, "[Service]\nRestartSec=20ms\n")
    dice = random.Random(rounds)
    try:
        box.wait_ready()
        before = box.journal().count(KEPT)
        client = answers.start(requests=rounds * 15, pause=0.1)
        client.wait_for("answer 2")
        for _ in range(rounds):
            pid = box.main_pid()
            time.sleep(dice.random() * 0.3)
            box.run("kill", "-KILL", str(pid))
            box.wait("the next daemon", lambda pid=pid: box.main_pid() not in (0, pid) and box.is_active())  # type: ignore[misc]
            assert box.show(DAEMON, "StatusText").startswith("ready: 1 models")
        client.check(rounds * 15, timeout=60 + rounds * 2)
        assert box.journal().count(KEPT) - before == rounds and origin(box) == "restart"
        assert stored(box) == 2
    finally:
        box.remove_drop_in(DAEMON)
