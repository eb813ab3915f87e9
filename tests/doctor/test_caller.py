"""Every finding about the caller: sockets, groups, units, versions; and the whole against a real socket or none."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from syshax.control import Control
from syshax.doctor.caller import CALLER_CHECKS, Caller, check_caller
from syshax.doctor.examination import examine, own_versions
from syshax.doctor.findings import exit_status
from syshax.doctor.snapshot import Group, Snapshot
from syshax.errors import DaemonAbsentError
from syshax.protocol import RING_VERSION, Check

GROUPS = {"syshax": Group(970, frozenset({"ada"})), "syshax-admin": Group(971, frozenset())}
VERSIONS = {"syshax": "0.1.0", "protocol": "1", "ring": "1"}
ABSENT = DaemonAbsentError("no syshaxd listens", "start it with `systemctl start syshaxd`")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sx") as folder:
        yield Path(folder)


@pytest.fixture
def listeners(runtime_dir: Path) -> Iterator[list[socket.socket]]:
    """Both sockets, listening, 0660."""
    made = []
    for name, kind in (("control.sock", socket.SOCK_STREAM), ("attach.sock", socket.SOCK_SEQPACKET)):
        made.append(socket.socket(socket.AF_UNIX, kind))
        made[-1].bind(str(runtime_dir / name))
        made[-1].listen()
        (runtime_dir / name).chmod(0o660)
    yield made
    for listener in made:
        listener.close()


def caller(runtime_dir: Path, **changes: object) -> Caller:
    snapshot = changes.pop("snapshot", None) or Snapshot()
    fields = {
        "snapshot": snapshot,
        "runtime_dir": runtime_dir,
        "versions": VERSIONS,
        "own_versions": VERSIONS,
        **changes,
    }
    return Caller(**fields)  # type: ignore[arg-type]


def faults(of: Caller) -> dict[str, Check]:
    found = {check.name: check for check in check_caller(of) if not check.ok}
    assert all(check.cost and check.hint for check in found.values())
    return found


def test_all_is_well(runtime_dir: Path, listeners: list[socket.socket]) -> None:
    checks = check_caller(caller(runtime_dir))
    assert exit_status(checks) == 0 and len(checks) >= len(CALLER_CHECKS)


def test_a_daemon_that_does_not_answer(runtime_dir: Path, listeners: list[socket.socket]) -> None:
    found = faults(caller(runtime_dir, failure=ABSENT))
    assert set(found) == {"daemon"} and found["daemon"].level == "error"
    assert found["daemon"].hint == ABSENT.hint


def test_sockets(runtime_dir: Path, listeners: list[socket.socket]) -> None:
    (runtime_dir / "control.sock").chmod(0o666)
    listeners[1].close()
    (runtime_dir / "attach.sock").unlink()
    found = faults(caller(runtime_dir))
    assert found["socket control.sock"].level == "warning" and "0666" in found["socket control.sock"].message
    assert found["socket attach.sock"].level == "error" and "does not exist" in found["socket attach.sock"].message
    (runtime_dir / "attach.sock").write_text("")
    assert "is no socket" in faults(caller(runtime_dir))["socket attach.sock"].message


def test_a_socket_on_which_nobody_listens(runtime_dir: Path, tmp_path: Path, listeners: list[socket.socket]) -> None:
    table = "Num RefCount Protocol Flags Type St Inode Path\n"
    connected, listening = "00000000", "00010000"
    for name, flags in (("control.sock", connected), ("control.sock", listening), ("attach.sock", connected)):
        table += f"0000000000000000: 00000002 00000000 {flags} 0001 01 1 {runtime_dir / name}\n"
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/unix").write_text(table)
    found = faults(caller(runtime_dir, snapshot=Snapshot(root=tmp_path)))
    assert set(found) == {"socket attach.sock"} and "nobody listens" in found["socket attach.sock"].message


@pytest.mark.parametrize(
    ("snapshot", "level", "says"),
    [
        (Snapshot(), "ok", "root"),
        (Snapshot(uid=5, user="eve", gids=frozenset({5}), groups=GROUPS), "error", "eve is not in syshax"),
        (Snapshot(uid=6, user="ada", gids=frozenset({6}), groups=GROUPS), "error", "this login is older"),
        (Snapshot(uid=6, user="ada", gids=frozenset({6, 970}), groups=GROUPS), "ok", "ada is in syshax"),
        (Snapshot(uid=6, user="ada", gids=frozenset({970, 971}), groups=GROUPS), "ok", "syshax-admin: may load"),
        (Snapshot(uid=5, user="eve", gids=frozenset({5})), "warning", "there is no group syshax"),
    ],
)
def test_groups(tmp_path: Path, snapshot: Snapshot, level: str, says: str) -> None:
    check = next(check for check in check_caller(caller(tmp_path / "none", snapshot=snapshot)) if check.name == "group")
    assert check.level == level and says in check.message


def test_a_daemon_of_ones_own_needs_no_group(runtime_dir: Path, listeners: list[socket.socket]) -> None:
    owner = (runtime_dir / "control.sock").stat()
    assert stat.S_ISSOCK(owner.st_mode)
    checks = check_caller(caller(runtime_dir, snapshot=Snapshot(uid=owner.st_uid or 0, user="me")))
    assert next(check for check in checks if check.name == "group").ok


def unit(**facts: str) -> dict[str, str]:
    return {"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled", "NRestarts": "0", **facts}


@pytest.mark.parametrize(
    ("facts", "level", "says"),
    [
        (unit(), "ok", "active, enabled"),
        (unit(ActiveState="failed", Result="watchdog"), "error", "failed (watchdog)"),
        (unit(LoadState="masked"), "error", "masked"),
        (unit(UnitFileState="disabled"), "warning", "not enabled"),
        (unit(NRestarts="7"), "warning", "restarted 7 times"),
    ],
)
def test_units(tmp_path: Path, facts: dict[str, str], level: str, says: str) -> None:
    units = {"syshaxd.service": facts, "syshax-api.service": unit(LoadState="not-found")}
    found = {c.name: c for c in check_caller(caller(tmp_path, snapshot=Snapshot(units=units)))}
    assert found["unit syshaxd.service"].level == level and says in found["unit syshaxd.service"].message
    assert found["unit syshax-api.service"].ok


def test_no_units_matter_only_without_a_daemon(tmp_path: Path) -> None:
    units = {"syshaxd.service": unit(LoadState="not-found"), "syshaxd.socket": unit(LoadState="not-found")}
    snapshot = Snapshot(units=units)
    assert "units" not in faults(caller(tmp_path, snapshot=snapshot))
    assert faults(caller(tmp_path, snapshot=snapshot, failure=ABSENT))["units"].level == "warning"


@pytest.mark.parametrize(
    ("versions", "level", "says"),
    [
        (VERSIONS, "ok", "both sides syshax 0.1.0, protocol 1, ring 1"),
        ({**VERSIONS, "syshax": "0.2.0"}, "warning", "client 0.1.0, daemon 0.2.0"),
        ({**VERSIONS, "protocol": "2"}, "error", "protocol: client 1, daemon 2"),
        ({**VERSIONS, "ring": "2"}, "error", "ring: client 1, daemon 2"),
        ({}, "warning", "the daemon tells none"),
    ],
)
def test_versions(tmp_path: Path, versions: dict[str, str], level: str, says: str) -> None:
    check = next(check for check in check_caller(caller(tmp_path, versions=versions)) if check.name == "versions")
    assert check.level == level and says in check.message


def test_the_whole_without_a_daemon(runtime_dir: Path) -> None:
    answer = examine(Control(runtime_dir), Snapshot())
    names = {check.name for check in answer.checks}
    assert {"daemon", "kernel", "huge pages", "versions"} <= names and exit_status(answer.checks) == 2


def test_our_ring_version_is_the_core_s() -> None:
    from syshaxd import _core

    assert own_versions()["ring"] == str(RING_VERSION) == str(_core.ring_abi()["constants"]["version_major"])
