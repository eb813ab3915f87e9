"""Who may do what with a daemon that runs as a service, tried as the users themselves.

Run by root, the processes of this test take other users' ids and groups, and the daemon is the system's own kind; run
by somebody else, the daemon is that user's (`--user`) and there is one user to try.
"""

from __future__ import annotations

import grp
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_daemon import RealDaemon, under_attack

from syshax import Client
from syshax.control import Control
from syshax.errors import SyshaxError
from syshax.protocol import (
    ConfigChangeAnswer,
    ConfigSetRequest,
    LoadRequest,
    ModelInfo,
    Priority,
    RestartAnswer,
    RestartRequest,
    SessionChange,
    SessionInfo,
    SessionsAnswer,
    StatusAnswer,
)

ROOT = os.geteuid() == 0
GROUPS = sorted(grp.getgrall(), key=lambda group: group.gr_gid)
MEMBERS, ADMINISTRATORS, UNRELATED = [group for group in GROUPS if 0 < group.gr_gid < 60000][:3]
"""Any three groups of this machine stand for syshax, syshax-admin and another."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RealDaemon]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(f'[access]\ngroup = "{MEMBERS.gr_name}"\nadmin_group = "{ADMINISTRATORS.gr_name}"\n')
        with under_attack(*(["--config", config] if ROOT else [])) as daemon:
            yield daemon


def as_user(uid: int, groups: list[int], work: Callable[[], Any]) -> Any:
    """What `work` gives in a process of that user, or the error of ours that it ended in: [code, message and hint]."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if ROOT and uid != 0:
                os.setgroups(groups)
                os.setresgid(65534, 65534, 65534)
                os.setresuid(uid, uid, uid)
            try:
                result = work()
            except SyshaxError as error:
                result = [error.code, f"{error.message} {error.hint}"]
            os.write(writing, json.dumps(result).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def attach_and_ask(daemon: RealDaemon) -> Callable[[], Any]:
    def work() -> Any:
        with Client(daemon.runtime_dir) as client:
            x = np.ones((1, 64), np.float32)
            y = client.open("tiny").moe(0, x, np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
            return bool(np.isfinite(y).all())

    return work


def verbs(daemon: RealDaemon, model_path: str, session_id: int) -> dict[str, Callable[[], Any]]:
    """What only an administrator may do; none changes anything that other tests need."""
    control = Control(daemon.runtime_dir)
    limits = ConfigSetRequest(values={"limits.stopped_seconds": 60})
    return {
        "load": lambda: (
            control.post("/v1/models", LoadRequest(name="other", path=model_path, format="bf16"), ModelInfo).state
        ),
        "unload": lambda: control.delete("/v1/models/nothing-of-that-name"),
        "config set": lambda: control.patch("/v1/config", limits, ConfigChangeAnswer).message,
        "config reload": lambda: control.post("/v1/config/reload", None, ConfigChangeAnswer).message,
        "restart": lambda: control.post("/v1/restart", RestartRequest(), RestartAnswer).pid,
        "sessions set": lambda: (
            control.patch(f"/v1/sessions/{session_id}", SessionChange(priority=Priority.NORMAL), SessionInfo).session_id
        ),
        "sessions kick": lambda: control.delete(f"/v1/sessions/{session_id}"),
    }


@pytest.fixture
def victim(daemon: RealDaemon) -> Iterator[int]:
    """Another user's session."""
    with Client(daemon.runtime_dir) as client:
        model = client.open("tiny")
        yield model.session_id


def names(value: Any, group: str) -> bool:
    return isinstance(value, list) and value[0] == "not_allowed" and group in value[1]


USERS = {
    "root": (0, []),
    "administrator": (54321, [MEMBERS.gr_gid, ADMINISTRATORS.gr_gid]),
    "member": (54322, [MEMBERS.gr_gid]),
    "other": (54323, [UNRELATED.gr_gid]),
    "administrator alone": (54324, [ADMINISTRATORS.gr_gid]),
}
SOME = USERS if ROOT else {"own user": (os.geteuid(), [])}


@pytest.mark.parametrize("who", SOME)
def test_attaching_takes_the_group(daemon: RealDaemon, who: str) -> None:
    result = as_user(*SOME[who], attach_and_ask(daemon))
    if who in ("other", "administrator alone"):
        assert names(result, f"its group is {MEMBERS.gr_name}") and "usermod -aG" in result[1]
    else:
        assert result is True


@pytest.mark.parametrize("who", SOME)
def test_looking_takes_the_group(daemon: RealDaemon, who: str) -> None:
    result = as_user(*SOME[who], lambda: Control(daemon.runtime_dir).get("/v1/status", StatusAnswer).state)
    assert names(result, MEMBERS.gr_name) if who in ("other", "administrator alone") else result == "ready"


@pytest.mark.parametrize(
    "verb", ["load", "unload", "config set", "config reload", "restart", "sessions set", "sessions kick"]
)
@pytest.mark.parametrize("who", SOME)
def test_administrators_verbs(daemon: RealDaemon, victim: int, who: str, verb: str) -> None:
    work = verbs(daemon, str(daemon.runtime_dir.parent / "absent"), victim)[verb]
    result = as_user(*SOME[who], work)
    if who == "member":
        assert names(result, ADMINISTRATORS.gr_name), result
    elif who in ("other", "administrator alone"):
        assert names(result, MEMBERS.gr_name), result
    else:  # whatever came of it, it was no lack of rights
        assert not (isinstance(result, list) and result[0] == "not_allowed"), result


def test_a_member_ends_its_own_session_alone(daemon: RealDaemon, victim: int) -> None:
    def work() -> Any:
        control = Control(daemon.runtime_dir)
        with Client(daemon.runtime_dir) as client:
            model = client.open("tiny")
            control.delete(f"/v1/sessions/{model.session_id}")
            return model.session_id

    own = as_user(54325, [MEMBERS.gr_gid], work)
    listed = daemon.control.get("/v1/sessions", SessionsAnswer).sessions
    assert isinstance(own, int) and victim in [session.session_id for session in listed]


def test_the_sockets_and_their_directory(daemon: RealDaemon) -> None:
    for name in ("control.sock", "attach.sock"):
        status = (daemon.runtime_dir / name).stat()
        assert status.st_mode & 0o777 == (0o660 if ROOT else 0o600)
        assert not ROOT or (status.st_uid, status.st_gid) == (0, MEMBERS.gr_gid)
    assert not daemon.runtime_dir.stat().st_mode & 0o022
