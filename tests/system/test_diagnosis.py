"""What an administrator sees of the service: records with fields, doctor's findings, the packed cache over a reboot."""

from __future__ import annotations

import json
from typing import Any

import pytest
from box import Box
from conftest import Answers

DAEMON = "syshaxd.service"


def records(box: Box, *matches: str) -> list[dict[str, Any]]:
    text = box.run("journalctl", "--no-pager", "-o", "json", "-u", DAEMON, *matches)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def doctor(box: Box, user: str = "root") -> tuple[int, dict[str, dict[str, Any]]]:
    status, output = box.try_run("syshaxctl", "doctor", "--json", user=user)
    return status, {check["name"]: check for check in json.loads(output)["checks"]}


def test_records_have_fields(box: Box, answers: Answers) -> None:
    box.wait_ready()
    answers.check()
    box.wait(
        "the record", lambda: any("is ready" in record["MESSAGE"] for record in records(box, "SYSHAX_MODEL=tiny")), 10
    )
    record = next(record for record in records(box, "SYSHAX_MODEL=tiny") if "is ready" in record["MESSAGE"])
    assert record["SYSHAX_LOGGER"] == "syshaxd.registry" and record["PRIORITY"] == "6"
    assert record["SYSLOG_IDENTIFIER"] == "syshaxd" and record["_SYSTEMD_UNIT"] == DAEMON
    attached = next(record for record in records(box, "SYSHAX_MODEL=tiny") if "attached" in record["MESSAGE"])
    session = attached["SYSHAX_SESSION"]
    about = [record["MESSAGE"] for record in records(box, f"SYSHAX_SESSION={session}")]
    assert any("attached to tiny" in message for message in about) and len(about) >= 2


def test_doctor_in_a_healthy_service(box: Box) -> None:
    box.wait_ready()
    status, checks = doctor(box)
    errors = {name: check["message"] for name, check in checks.items() if check["level"] == "error"}
    assert not errors and status in (0, 1)
    assert checks["unit syshaxd.service"]["message"].startswith("active")
    for name in ("daemon", "socket control.sock", "socket attach.sock", "versions", "kernel", "model tiny"):
        assert checks[name]["ok"], checks[name]
    assert "group syshax" in checks["socket control.sock"]["message"]
    assert "alice is in syshax" in doctor(box, user="alice")[1]["group"]["message"]
    assert "may load" in doctor(box, user="bob")[1]["group"]["message"]


def test_doctor_tells_a_stranger_why(box: Box) -> None:
    status, checks = doctor(box, user="carol")
    assert status == 2 and checks["group"]["level"] == "error"
    assert checks["group"]["hint"].startswith("usermod -aG syshax carol")


@pytest.mark.long
def test_doctor_without_a_daemon(box: Box) -> None:
    box.systemctl("stop", "syshaxd.socket", DAEMON)
    try:
        status, checks = doctor(box)
        assert status == 2 and checks["daemon"]["level"] == "error" and checks["kernel"]["ok"]
        assert checks["unit syshaxd.service"]["message"].startswith("inactive")
    finally:
        box.systemctl("start", "syshaxd.socket", DAEMON)
        box.wait_ready()


@pytest.mark.long
def test_after_a_reboot_the_model_comes_from_the_cache(box: Box, answers: Answers) -> None:
    """Nothing is in the service manager's store then, and nothing is converted."""
    box.wait_ready()

    def entries() -> list[dict[str, Any]]:
        return json.loads(box.run("syshaxctl", "cache", "list", "--json"))["entries"]  # type: ignore[no-any-return]

    box.wait("the entry", lambda: bool(entries()), 30)
    (entry,) = entries()
    assert entry["in_use"] and entry["name"] == "tiny"
    owner = box.run("stat", "-c", "%U %a", "/var/cache/syshax")
    assert owner == "syshax 750"
    box.reboot()
    box.wait("the daemon", lambda: box.is_active() and box.main_pid() > 0)
    box.wait_ready()
    (model,) = json.loads(box.run("syshaxctl", "models", "--json"))["models"]
    assert model["state"] == "ready" and model["origin"] == "cache"
    answers.check()
    assert box.try_run("syshaxctl", "cache", "prune", "--all", user="alice")[0] == 4
    assert json.loads(box.run("syshaxctl", "cache", "prune", "--all", "--json"))["kept"] == [entry["key"]]
