"""The other services: workers, which outlive the daemon's restarts, and the front-end, which cannot reach weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from box import PACKAGES, PROGRAMS, Box
from conftest import MODELS

DAEMON, WORKER, API = "syshaxd.service", "syshax-worker@one.service", "syshax-api.service"
STAND_IN = f"""#!/bin/sh
# In the place of a Python with vLLM: attaches and computes for ever.
for word; do echo "word: $word"; done
exec env PYTHONPATH={PACKAGES} /usr/bin/python3 -s {PROGRAMS}/inside_requests.py tiny --forever --pause 0.05
"""
ENGINE = """#!/bin/sh
# In the place of podman.
for word; do echo "word: $word"; done
"""


def words(box: Box, unit: str) -> list[str]:
    lines = box.journal(unit).splitlines()
    return [line.removeprefix("word: ") for line in lines if line.startswith("word: ")]


def answered(box: Box) -> int:
    return box.journal(WORKER).count("\nanswer ")


def more_answers(box: Box) -> None:
    before = answered(box)
    box.wait("more answers", lambda: answered(box) > before + 3)


@pytest.fixture
def worker(box: Box) -> Iterator[None]:
    box.write("/usr/local/bin/stand-in", STAND_IN, 0o755)
    options = """--port 8001 --additional-config '{"a b": 1}'"""
    quoted = options.replace('"', '\\"')
    box.write(
        "/etc/syshax/workers/one.env",
        f'WORKER_MODEL={MODELS}/tiny\nWORKER_PYTHON=/usr/local/bin/stand-in\nWORKER_OPTIONS="{quoted}"\n',
    )
    yield
    box.systemctl("stop", WORKER)


@pytest.mark.usefixtures("worker")
def test_a_worker_brings_the_daemon_and_outlives_its_restarts(box: Box) -> None:
    box.systemctl("stop", DAEMON)
    box.systemctl("start", WORKER)
    box.wait("answers", lambda: answered(box) > 3)
    assert box.is_active(DAEMON)
    assert words(box, WORKER) == [
        "-m", "syshax.vllm.launcher", f"{MODELS}/tiny", "--port", "8001", "--additional-config", '{"a b": 1}',
    ]  # fmt: skip
    pid = box.main_pid(WORKER)
    assert "syshax" in box.run("ps", "-o", "supgrp=", "-p", str(pid)).split(",")
    box.systemctl("restart", DAEMON)
    more_answers(box)
    box.run("kill", "-KILL", str(box.main_pid(DAEMON)))
    more_answers(box)
    box.systemctl("stop", DAEMON)
    more_answers(box)  # its own connecting has started the daemon again
    assert box.is_active(DAEMON) and box.main_pid(WORKER) == pid and box.show(WORKER, "NRestarts") == "0"


def test_a_worker_without_a_model_says_so_and_stays_down(box: Box) -> None:
    box.write("/etc/syshax/workers/empty.env", "WORKER_OPTIONS=\n")
    unit = "syshax-worker@empty.service"
    box.systemctl("start", unit)
    box.wait("its end", lambda: box.show(unit, "ActiveState") == "failed", 20)
    assert "workers/empty.env sets no WORKER_MODEL" in box.journal(unit) and box.show(unit, "ExecMainStatus") == "2"
    status, output = box.try_run("systemctl", "start", "syshax-worker@nobody.service")
    assert status != 0 and "syshax-worker@nobody.service" in output
    box.systemctl("reset-failed")


def test_a_worker_in_a_container_gets_the_sockets_and_their_group(box: Box) -> None:
    """With a stand-in for the engine: the command that it is given."""
    box.write("/usr/local/bin/engine", ENGINE, 0o755)
    engine = "WORKER_IMAGE=image:1\nWORKER_ENGINE=engine\nWORKER_ENGINE_OPTIONS=--device /dev/x\n"
    box.write("/etc/syshax/workers/boxed.env", f"WORKER_MODEL={MODELS}/tiny\n{engine}")
    unit = "syshax-worker@boxed.service"
    box.systemctl("start", unit)
    box.wait("its end", lambda: not box.is_active(unit), 20)
    group = box.run("getent", "group", "syshax").split(":")[2]
    command = words(box, unit)
    assert command[command.index("--group-add") + 1] == group
    assert "/run/syshax:/run/syshax" in command and f"{MODELS}/tiny:{MODELS}/tiny:ro" in command
    assert command[-5:] == ["--device", "/dev/x", "image:1", "syshax-worker", f"{MODELS}/tiny"]


FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).status)"


def test_the_front_end_is_started_by_its_first_client_and_reaches_no_weights(box: Box) -> None:
    box.write("/etc/syshax/syshax-api.toml.d/test.toml", 'workers = ["http://127.0.0.1:9"]\n')
    box.systemctl("start", "syshax-api.socket")
    assert not box.is_active(API)
    fetch = ["/usr/bin/python3", "-c", FETCH, "http://127.0.0.1:8000/health"]
    assert box.run(*fetch, user="carol") == "200"
    pid = box.main_pid(API)
    assert box.run("ps", "-o", "user=,group=,supgrp=", "-p", str(pid)).split()[0] == "syshax-+"
    assert box.run("nsenter", "-t", str(pid), "-m", "ls", "-A", "/run/syshax", "/var/lib/syshax").split() == [
        "/run/syshax:", "/var/lib/syshax:",
    ]  # fmt: skip
    box.systemctl("restart", "--no-block", API)
    assert box.run(*fetch) == "200"
    box.wait("the daemon's view", lambda: '"daemon": "answers"' in box.run("/usr/bin/python3", "-c", READY), 10)
    box.systemctl("stop", "syshax-api.socket", API)


READY = """import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8000/ready", timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())"""
ASK = """import socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    try:
        asking.connect(sys.argv[1])
    except OSError as error:
        sys.exit(type(error).__name__)
    asking.sendall(f"{sys.argv[2]} HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n".encode())
    print(asking.recv(100).split()[1].decode())"""


def test_the_view_socket_is_for_its_group_and_shows_only(box: Box) -> None:
    view, control = "/run/syshax-view/view.sock", "/run/syshax/control.sock"

    def ask(user: str, path: str, request: str = "GET /v1/status") -> str:
        return box.try_run("/usr/bin/python3", "-c", ASK, path, request, user=user)[1]

    box.systemctl("start", DAEMON)
    modes = box.run("stat", "-c", "%a %U %G", "/run/syshax-view", view).splitlines()
    assert modes == ["2750 syshax syshax-view", "660 syshax syshax-view"]
    assert (ask("syshax-api", view), ask("syshax-api", control)) == ("200", "PermissionError")
    assert ask("syshax-api", view, "DELETE /v1/models/tiny") == "404" == ask("root", view, "POST /v1/restart")
    assert (ask("carol", view), ask("alice", view)) == ("PermissionError", "PermissionError")
    box.systemctl("restart", DAEMON)
    assert ask("syshax-api", view) == "200", "a restarted daemon has it again"


def test_processes_and_live_workers_of_the_front_end(box: Box) -> None:
    """Under its unit: who may change workers, a process that dies, a supervisor that is killed, an orderly end."""
    control = "/run/syshax-api/control.sock"
    box.write("/etc/syshax/syshax-api.toml.d/test.toml", 'processes = 2\nworkers = ["http://127.0.0.1:9"]\n')
    box.systemctl("restart", "syshax-api.socket", API)

    def children() -> list[str]:
        return sorted(box.try_run("pgrep", "-P", str(box.main_pid(API)))[1].split())

    def ask(user: str) -> str:
        return box.try_run("/usr/bin/python3", "-c", ASK, control, "GET /v1/workers", user=user)[1]

    pid, first = box.main_pid(API), children()
    assert len(first) == 2
    assert [ask(user) for user in ("root", "bob", "syshax-api", "alice", "carol")] == ["200"] * 3 + ["403"] * 2
    assert 'workers = ["http://127.0.0.1:9", "unix:/run/w.sock"]' in box.run(
        "syshaxctl", "workers", "add", "unix:/run/w.sock", user="bob"
    )
    box.run("kill", "-KILL", first[0])
    box.wait("another process", lambda: len(children()) == 2 and first[0] not in children(), 20)
    assert box.main_pid(API) == pid and first[1] in children()
    assert "unix:/run/w.sock" in box.run("syshaxctl", "workers")
    fetch = ["/usr/bin/python3", "-c", FETCH, "http://127.0.0.1:8000/health"]
    assert [box.run(*fetch) for _ in range(4)] == ["200"] * 4
    old = children()
    box.run("kill", "-KILL", str(pid))
    box.wait("another supervisor", lambda: box.main_pid(API) not in (0, pid) and len(children()) == 2, 20)
    assert not set(old) & set(box.run("ps", "-eo", "pid=").split()) and box.run(*fetch) == "200"
    box.systemctl("stop", "syshax-api.socket", API)
    assert box.show(API, "Result") == "success" and box.show(API, "ExecMainStatus") == "0"
    assert not box.path(control).exists()
