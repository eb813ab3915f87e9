"""The daemon as a service: it comes up with the machine, survives what may happen to it, and says who may do what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import Box
from conftest import MODELS, Answers

DAEMON, SOCKET = "syshaxd.service", "syshaxd.socket"


def test_it_comes_up_with_the_machine_and_answers(box: Box, answers: Answers) -> None:
    """Nobody has started anything: the boot has, and the configured model loads by itself."""
    box.wait_ready()
    assert box.show(DAEMON, "ActiveState") == "active"
    box.wait("the status line", lambda: box.show(DAEMON, "StatusText").startswith("ready: 1 models"), 10)
    answers.check(requests=4)


def test_it_runs_with_no_right_of_root(box: Box) -> None:
    status = box.path(f"/proc/{box.main_pid()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uid = box.run("id", "-u", "syshax")
    assert set(fields["Uid"].split()) == {uid} and uid != "0"
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    assert box.show(DAEMON, "Slice") == "syshax.slice" and box.show(DAEMON, "LimitMEMLOCK") == "infinity"


def test_models_are_read_wherever_their_permissions_allow(box: Box) -> None:
    for place in ("/home/alice/models", "/tmp"):
        box.run("mkdir", "-p", place)
        box.run("cp", "-r", f"{MODELS}/tiny", f"{place}/other")
        box.run("syshaxctl", "load", f"{place}/other", "--wait")
        box.run("syshaxctl", "unload", "other")


def test_who_may_do_what(box: Box) -> None:
    load = ["syshaxctl", "load", f"{MODELS}/tiny", "--name", "second", "--wait"]
    status, output = box.try_run("syshaxctl", "status", user="carol")
    assert status == 4 and "usermod -aG syshax" in output
    assert "ready" in box.run("syshaxctl", "status", user="alice")
    status, output = box.try_run(*load, user="alice")
    assert status == 4 and "syshax-admin" in output
    box.run(*load, user="bob")
    status, output = box.try_run("syshaxctl", "unload", "second", user="alice")
    assert status == 4
    box.run("syshaxctl", "unload", "second", user="bob")


def test_a_client_that_connects_while_the_daemon_is_down_waits_and_is_served(box: Box, answers: Answers) -> None:
    """The first one starts the daemon, which stands before a gate until all of them have knocked."""
    box.systemctl("stop", DAEMON)
    sockets = [box.path(f"/run/syshax/{name}.sock").stat().st_ino for name in ("control", "attach")]
    box.drop_in(DAEMON, "[Service]\nExecStartPre=/bin/sh -c 'until [ -e /run/syshax/gate ]; do sleep .1; done'\n")
    try:
        clients = [answers.start(user="alice"), answers.start(user="bob")]
        control = box.popen("syshaxctl", "status", user="alice")
        for client in clients:
            client.wait_for("connecting")
        box.wait("a start", lambda: box.show(DAEMON, "ActiveState") == "activating")
        time.sleep(0.5)
        assert control.poll() is None and all(client.process.poll() is None for client in clients)
        box.write("/run/syshax/gate", "")
        for client in clients:
            client.check(3)
        assert control.wait(30) == 0
        box.systemctl("restart", "--no-block", DAEMON)
        answers.check()
    finally:
        box.remove_drop_in(DAEMON)
    assert sockets == [box.path(f"/run/syshax/{name}.sock").stat().st_ino for name in ("control", "attach")]


def test_a_client_goes_on_over_restart_and_kill(box: Box, answers: Answers) -> None:
    client = answers.start(requests=60, pause=0.1)
    client.wait_for("answer 2")
    box.systemctl("restart", DAEMON)
    client.wait_for("answer 20")
    box.run("kill", "-KILL", str(box.main_pid()))
    client.check(60)


def test_a_stuck_data_plane_is_restarted_by_the_watchdog(box: Box, answers: Answers) -> None:
    """One thread stands still, as in an endless loop; the control plane goes on and must not hide that."""
    box.drop_in(DAEMON, "[Service]\nWatchdogSec=2\n")
    try:
        box.systemctl("restart", DAEMON)
        box.wait_ready()
        pid = box.main_pid()
        time.sleep(4)
        assert box.main_pid() == pid, "idle is not stuck"
        client = answers.start(requests=40, pause=0.1)
        busy = answers.start(requests=100000)
        busy.wait_for("answer 2")
        stopper = box.popen(*box.python("inside_stop_thread.py", str(pid), "syshax-dispatch"))
        box.wait("another process", lambda: box.main_pid() not in (0, pid), 30)
        busy.kill()
        client.check(40)
        assert stopper.wait(30) == 0
        assert "watchdog" in box.journal().lower()
    finally:
        box.remove_drop_in(DAEMON)
        box.systemctl("restart", DAEMON)


@pytest.fixture
def broken_config(box: Box) -> Iterator[Path]:
    file = box.path("/etc/syshax/syshaxd.toml.d/broken.toml")
    file.write_text("[compute]\nthread = 1\n")
    yield file
    file.unlink(missing_ok=True)


@pytest.mark.long
def test_a_daemon_that_cannot_start_is_tried_until_it_can(box: Box, answers: Answers, broken_config: Path) -> None:
    """More failures than systemd's default limit, clients waiting all the time: nothing needs reset-failed."""
    box.drop_in(DAEMON, "[Service]\nRestartSec=50ms\n")
    try:
        box.systemctl("restart", "--no-block", DAEMON)
        box.wait("failures", lambda: int(box.show(DAEMON, "NRestarts")) >= 6, 90)
        assert "nearest valid key: compute.threads" in box.journal() or "compute.thread" in box.journal()
        client = answers.start()
        broken_config.unlink()
        client.check(3)
        assert box.is_active(SOCKET)
    finally:
        box.remove_drop_in(DAEMON)


@pytest.mark.long
def test_stopping_both_takes_the_sockets_away(box: Box, answers: Answers) -> None:
    box.systemctl("stop", SOCKET, DAEMON)
    assert not [file.name for file in box.path("/run/syshax").iterdir() if file.suffix == ".sock"]
    status, output = box.try_run("syshaxctl", "status")
    assert status == 3 and "systemctl start syshaxd" in output
    box.systemctl("start", DAEMON)
    answers.check()


@pytest.mark.long
def test_a_fence_of_cpus_and_nodes_holds(box: Box, answers: Answers) -> None:
    """The settings that work under cgroup v1 as well."""
    box.drop_in(DAEMON, "[Service]\nCPUAffinity=0\nNUMAPolicy=bind\nNUMAMask=0\n")
    try:
        box.systemctl("restart", DAEMON)
        answers.check()
        threads = list(box.path(f"/proc/{box.main_pid()}/task").glob("*/status"))
        allowed = {
            line for file in threads for line in file.read_text().splitlines() if line.startswith("Cpus_allowed_list")
        }
        assert len(threads) > 2 and allowed == {"Cpus_allowed_list:\t0"}
        assert " bind:0 " in box.path(f"/proc/{box.main_pid()}/numa_maps").read_text()
    finally:
        box.remove_drop_in(DAEMON)
        box.systemctl("restart", DAEMON)


@pytest.mark.long
def test_after_a_reboot_the_configured_model_loads_by_itself(box: Box, answers: Answers) -> None:
    machine = box.run("cat", "/proc/1/stat")
    box.reboot()
    box.wait("the daemon", lambda: box.is_active() and box.main_pid() > 0)
    assert box.run("cat", "/proc/1/stat") != machine
    box.wait("the status line", lambda: box.show(DAEMON, "StatusText").startswith("ready: 1 models"))
    answers.check()
