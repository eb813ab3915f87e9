"""The daemon's life: sockets after a crash, the lock, systemd's words, signals, draining, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from conftest import Daemon, eventually
from fake_core import FakeCore

from syshax.errors import ConfigError, HardwareError
from syshaxd.config import LoggingConfig
from syshaxd.config_files import ConfigFiles
from syshaxd.logs import JsonFormatter, TextFormatter
from syshaxd.server import EXIT_RESTART, EXIT_UNDRAINED, Options, Server
from syshaxd.sockets import AlreadyRunningError, open_listeners
from syshaxd.systemd import Handed, take_handed, watchdog_seconds


def stale_socket(path: Path, kind: socket.SocketKind) -> None:
    """What a daemon leaves behind that was killed with -9."""
    with socket.socket(socket.AF_UNIX, kind) as left:
        left.bind(str(path))


async def test_sockets_of_a_killed_daemon_are_replaced(start: Callable[..., Any], short_dir: Path) -> None:
    (short_dir / "run").mkdir(mode=0o700)
    stale_socket(short_dir / "run/control.sock", socket.SOCK_STREAM)
    stale_socket(short_dir / "run/attach.sock", socket.SOCK_SEQPACKET)
    (short_dir / "run/syshaxd.lock").write_text("99999\n")
    daemon = await start()
    assert (await daemon.json("GET", "/v1/status"))[0] == 200
    assert await daemon.stop() == 0
    assert sorted(path.name for path in (short_dir / "run").iterdir()) == ["syshaxd.lock"]


async def test_a_second_daemon_is_told_of_the_first_and_leaves_it_alone(daemon: Daemon) -> None:
    files = ConfigFiles(daemon.config_file, True, None)
    with pytest.raises(AlreadyRunningError, match=f"pid {os.getpid()}") as caught:
        Server(FakeCore(), Options(files, daemon.runtime_dir, True))
    assert caught.value.exit_code == 3
    assert (await daemon.json("GET", "/v1/status"))[0] == 200
    connection, answer, _ = await daemon.attach({"model": "tiny", "max_tokens": 1})
    assert "session_id" in answer
    connection.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_another_programs_listener_is_never_evicted(short_dir: Path, kind: socket.SocketKind) -> None:
    (short_dir / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(short_dir / "run/attach.sock"))
        other.listen()
        with pytest.raises(AlreadyRunningError, match=r"attach\.sock is in use"):
            open_listeners(short_dir / "run", "none", True)
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.connect(str(short_dir / "run/attach.sock"))
    assert not (short_dir / "run/control.sock").exists(), "nothing of the failed start stays"
    open_listeners(short_dir / "run", "none", True).close()


def test_directories_that_cannot_be_used(short_dir: Path) -> None:
    (short_dir / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_listeners(short_dir / "file/run", "none", True)
    (short_dir / "open").mkdir()
    (short_dir / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"not private: owner uid .*0777"):
        open_listeners(short_dir / "open", "none", True)
    (short_dir / "run").mkdir(mode=0o700)
    (short_dir / "run/control.sock").write_text("precious")
    with pytest.raises(ConfigError, match="it is not a socket"):
        open_listeners(short_dir / "run", "none", True)
    assert (short_dir / "run/control.sock").read_text() == "precious"
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        open_listeners(short_dir / ("x" * 120), "none", True)


def test_modes_and_group_of_a_system_daemon(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = open_listeners(short_dir / "a", "no-such-group-here", False)
    assert not listeners.group_found
    assert (short_dir / "a/attach.sock").stat().st_mode & 0o777 == 0o600
    listeners.close()
    monkeypatch.setattr("syshaxd.sockets._group_id", lambda group: os.getgid())
    listeners = open_listeners(short_dir / "b", "syshax", False)
    for name in ("attach.sock", "control.sock"):
        status = (short_dir / "b" / name).stat()
        assert (status.st_mode & 0o777, status.st_gid) == (0o660, os.getgid())
    listeners.close()


def test_sockets_from_systemd_are_told_apart_by_kind(short_dir: Path) -> None:
    made: list[tuple[str, socket.socket]] = []
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        made.append(("syshaxd", socket.socket(socket.AF_UNIX, kind)))
        made[-1][1].bind(str(short_dir / kind.name))
        made[-1][1].listen()
    listeners = open_listeners(short_dir / "run", "none", True, made)
    assert listeners.own_paths == () and (listeners.attach, listeners.control) == (made[0][1], made[1][1])
    listeners.close()
    assert (short_dir / "SOCK_STREAM").exists(), "systemd's sockets are not removed"


@pytest.mark.parametrize(
    "kinds",
    [
        [(socket.AF_UNIX, socket.SOCK_STREAM)] * 2,
        [(socket.AF_UNIX, socket.SOCK_DGRAM)],
        [(socket.AF_INET, socket.SOCK_STREAM)],
    ],
)
def test_sockets_of_no_use_are_refused(kinds: list[tuple[int, int]], short_dir: Path) -> None:
    given = [("odd", socket.socket(family, kind)) for family, kind in kinds]
    for _ in range(2):  # the second finds the directory's lock free again
        with pytest.raises(ConfigError, match=r"no use for \(odd: "):
            open_listeners(short_dir / "run", "none", True, given)
    for _, handed in given:
        handed.close()


def test_variables_of_other_processes_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "2")
    assert take_handed() == Handed() and "LISTEN_FDS" not in os.environ
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    assert watchdog_seconds() == 2.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() is None


@contextlib.contextmanager
def notify_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(folder / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(folder / "notify"))
        heard: list[str] = []

        def listen() -> list[str]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    heard.extend(listener.recv(4096).decode().split("\n"))
            return heard

        yield listen


async def test_systemd_hears_ready_status_watchdog_reloading_and_stopping(
    start: Callable[..., Any], short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "m")
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    monkeypatch.setattr("syshaxd.server.SAMPLE_SECONDS", 0.05)
    with notify_socket(short_dir, monkeypatch) as heard:
        core = FakeCore()
        core.gate_load.clear()
        daemon = await start(f'[models.m]\npath = "{tmp_path / "m"}"\nautoload = true\n', core)
        assert "READY=1" in heard(), "ready when it serves, while models still load"
        await eventually(lambda: "STATUS=ready: 0 models, 0 sessions; loading m: 0 of 2 layers" in heard())
        core.gate_load.set()
        await eventually(lambda: "STATUS=ready: 1 models, 0 sessions" in heard())
        await eventually(lambda: "WATCHDOG=1" in heard())
        core.heartbeat_age_ns = 10**9
        await asyncio.sleep(0.2)
        seen = heard().count("WATCHDOG=1")
        await asyncio.sleep(0.5)
        assert heard().count("WATCHDOG=1") == seen, "a data plane that stands still is not reported alive"
        core.heartbeat_age_ns = 0
        await eventually(lambda: heard().count("WATCHDOG=1") > seen)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: "RELOADING=1" in heard() and heard().count("READY=1") == 2)
        assert any(line.startswith("MONOTONIC_USEC=") for line in heard())
        await daemon.stop()
        assert "STOPPING=1" in heard()


async def test_a_reload_with_mistakes_keeps_serving(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.config_file.write_text("[limits]\nsesions = 3\n")
    os.kill(os.getpid(), signal.SIGHUP)
    await eventually(lambda: "limits.sessions" in caplog.text)
    assert "not reloaded" in caplog.text
    assert (await daemon.json("GET", "/v1/models/tiny"))[1]["state"] == "ready"
    daemon.config_file.write_text('[limits]\nsessions = 3\n[compute]\nspin_us = 7\n[logging]\nlevel = "warning"\n')
    os.kill(os.getpid(), signal.SIGHUP)
    await eventually(lambda: daemon.server.parts.config.current().limits.sessions == 3)
    assert daemon.server.parts.config.needs_restart() == ["compute.spin_us"]
    assert logging.getLogger().level == logging.WARNING


async def test_a_stop_drains_ends_sessions_and_removes_sockets(daemon: Daemon) -> None:
    connection, _, _ = await daemon.attach({"model": "tiny", "max_tokens": 1})
    assert await daemon.stop() == 0
    assert connection.recv(10) == b""
    connection.close()
    runtime = daemon.core.runtime
    assert runtime.drained and runtime.stopped and not runtime.sessions
    assert not (daemon.runtime_dir / "attach.sock").exists() and not (daemon.runtime_dir / "control.sock").exists()


async def test_requests_that_do_not_finish_show_in_the_exit_code(daemon: Daemon) -> None:
    daemon.core.never_drains = True
    assert await daemon.stop() == EXIT_UNDRAINED


async def test_a_stop_cancels_a_load_and_does_not_wait_for_silent_clients(daemon: Daemon, tmp_path: Path) -> None:
    daemon.core.gate_load.clear()
    await daemon.json("POST", "/v1/models", {"name": "slow", "path": str(tmp_path / "tiny")})
    entry = next(entry for entry in daemon.server.parts.registry.entries() if entry.name == "slow")
    await eventually(lambda: entry.progress.stage == "converting")
    silent = daemon.dial()
    daemon.server.stop()
    await eventually(lambda: entry.cancel.is_set())
    daemon.core.gate_load.set()
    async with asyncio.timeout(3):
        assert await daemon.task == 0
    silent.close()
    assert len(daemon.core.runtime.models) == 1


async def test_a_start_that_cannot_be_says_why_before_anything_is_bound(short_dir: Path) -> None:
    for text, error, words in [
        ("[compute]\nnodes = [5]", HardwareError, "this machine's nodes are 0"),
        ('[compute]\nisa = "sse"', HardwareError, "sse"),
        ('[models.a]\npath = "/m"\nformat = "q8_1"', ConfigError, "models.a.format: there is no format 'q8_1'"),
        ("[compute", ConfigError, "line 1"),
    ]:
        (short_dir / "c.toml").write_text(text)
        with pytest.raises(error, match=words):
            Server(FakeCore(), Options(ConfigFiles(short_dir / "c.toml", True), short_dir / "run", True))
        assert not (short_dir / "run").exists()


def record(**extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("syshaxd.x", logging.WARNING, "f", 1, "a %s\nb", ("q",), None)
    vars(made).update(extra)
    return made


def test_log_lines_are_one_line_each() -> None:
    entry = json.loads(JsonFormatter().format(record(model="m", path=Path("/x"))))
    assert entry["message"] == "a q\nb" and entry["model"] == "m" and entry["path"] == "/x"
    assert entry["level"] == "warning" and entry["time"].endswith("Z")
    assert TextFormatter(journal=False).format(record(model="m")).endswith("Z warning: a q\\nb model=m")
    assert TextFormatter(journal=True).format(record()) == "<4>a q\\nb"
    assert LoggingConfig().format == "text"


@pytest.mark.parametrize("drain", [True, False])
async def test_a_restart_ends_in_order_with_a_status_of_its_own(
    start: Callable[..., Any], short_dir: Path, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    monkeypatch.setenv("INVOCATION_ID", "0" * 32)
    with notify_socket(short_dir, monkeypatch):
        daemon = await start()
        status, answer = await daemon.json("POST", "/v1/restart", {"drain": drain})
        assert status == 202 and answer == {"boot_id": daemon.server.parts.boot, "pid": os.getpid()}
        assert await daemon.task == EXIT_RESTART and daemon.core.runtime.drained


async def test_a_restart_without_a_service_manager_is_refused(daemon: Daemon) -> None:
    status, answer = await daemon.json("POST", "/v1/restart", {})
    assert (status, answer["error"]["code"]) == (409, "not_supervised")
    assert f"kill {os.getpid()}" in answer["error"]["hint"]
    assert (await daemon.json("GET", "/v1/status"))[0] == 200
