"""The view socket: five GET routes, whoever asks; its mode and group; a daemon without it; workers' addresses."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon
from test_connections import Users, users

import syshax.protocol as protocol
from syshax.errors import InvalidArgumentError
from syshax.protocol import ExpertsAnswer, StatusAnswer
from syshax.routes import ROUTES, VIEW_ROUTES
from syshaxd import sockets
from syshaxd.attach import parse_request
from syshaxd.control.connections import PER_USER
from syshaxd.sockets import open_listeners, view_directory

__all__ = ["users"]


async def ask(daemon: Daemon, method: str, path: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_unix_connection(daemon.runtime_dir / "view.sock")
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("route", VIEW_ROUTES)
async def test_it_answers_as_the_control_socket_does(daemon: Daemon, route: str) -> None:
    path = route.split()[1].replace("{name}", "tiny")
    status, seen = await ask(daemon, "GET", path)
    assert status == 200
    control = (await daemon.json("GET", path))[1]
    assert getattr(protocol, ROUTES[route]).model_validate(seen)
    assert seen.keys() == control.keys()


async def test_nothing_else_is_there_even_for_root(daemon: Daemon) -> None:
    """Whoever runs this is administrator of the daemon on the other socket."""
    for route in sorted(set(ROUTES) - set(VIEW_ROUTES)):
        method, path = route.split()
        status, answer = await ask(daemon, method, path.replace("{name}", "tiny").replace("{session_id}", "1"))
        assert (status, answer["error"]["code"]) == (404, "not_found"), route
        listed = answer["error"]["hint"].removeprefix("routes: ").split(", ")
        assert set(listed) <= set(VIEW_ROUTES), "only what is there is offered"
    assert (await ask(daemon, "GET", "/v1/models/tiny"))[1]["state"] == "ready"


async def test_experts_are_counted_by_layer(daemon: Daemon) -> None:
    status, seen = await ask(daemon, "GET", "/v1/models/tiny/experts")
    experts = ExpertsAnswer.model_validate(seen)
    assert status == 200 and len(experts.tokens) == experts.layers == len(experts.layer_ids)
    assert [row[3] for row in experts.tokens] == [100 * layer + 3 for layer in range(experts.layers)]
    assert all(len(row) == experts.experts for row in experts.tokens)
    info = (await ask(daemon, "GET", "/v1/models/tiny"))[1]
    assert experts.bytes_read == 7 * experts.expert_bytes > 0
    assert experts.expert_bytes * experts.layers * experts.experts <= sum(info["node_bytes"].values())
    assert (await ask(daemon, "GET", "/v1/models/nobody/experts"))[0] == 404


async def test_a_session_shows_where_its_worker_answers(daemon: Daemon) -> None:
    told, _, _ = await daemon.attach({"model": "tiny", "max_tokens": 1, "address": "http://0.0.0.0:8001"})
    old, _, _ = await daemon.attach({"model": "tiny", "max_tokens": 1})
    sessions = (await ask(daemon, "GET", "/v1/sessions"))[1]["sessions"]
    assert [session["address"] for session in sessions] == ["http://0.0.0.0:8001", ""]
    told.close()
    old.close()


@pytest.mark.parametrize("address", ["a b", "http://x\n", "é", "x" * 201, 7])
def test_an_address_is_one_short_word(address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="address"):
        parse_request(json.dumps({"model": "m", "max_tokens": 1, "address": address}).encode())


async def test_connections_are_bounded_apart_from_the_control_socket(daemon: Daemon, users: Users) -> None:
    users.uid = 4711
    held = []
    for _ in range(PER_USER):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(daemon.runtime_dir / "view.sock"))
        held.append(connection)
    status, answer = await ask(daemon, "GET", "/v1/status")
    assert status == 429 and f"{PER_USER} connections to the view socket" in answer["error"]["message"]
    assert (await daemon.json("GET", "/v1/status"))[0] == 200, "the control socket has its own count"
    for connection in held:
        connection.close()


async def test_it_goes_with_the_daemon(daemon: Daemon) -> None:
    assert (daemon.runtime_dir / "view.sock").exists()
    await daemon.stop()
    assert not (daemon.runtime_dir / "view.sock").exists()


async def test_a_daemon_that_cannot_have_it_says_so_and_serves(daemon: Daemon) -> None:
    daemon.server.parts.view_trouble = "/run/syshax-view: Permission denied"
    status: StatusAnswer = await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)
    assert any("no view socket" in warning and "Permission denied" in warning for warning in status.warnings)


def test_mode_group_and_troubles(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str, private: bool = False, group: str = "g") -> sockets.Listeners:
        return open_listeners(short_dir / name, "none", private, (), group)

    listeners = opened("a")  # there is no such group
    assert (short_dir / "a/view.sock").stat().st_mode & 0o777 == 0o600 and not listeners.view_trouble
    listeners.close()
    assert not (short_dir / "a/view.sock").exists()
    monkeypatch.setattr(sockets, "_group_id", lambda group: os.getgid() if group == "g" else None)
    listeners = opened("b")
    status = (short_dir / "b/view.sock").stat()
    assert (status.st_mode & 0o777, status.st_gid) == (0o660, os.getgid())
    listeners.close()
    listeners = opened("c", private=True)
    assert (short_dir / "c/view.sock").stat().st_mode & 0o777 == 0o600
    listeners.close()
    (short_dir / "d").mkdir()
    (short_dir / "d/view.sock").write_text("precious")
    listeners = opened("d")
    assert listeners.view is None and "it is not a socket" in listeners.view_trouble
    listeners.close()
    assert (short_dir / "d/view.sock").read_text() == "precious"


def test_only_the_systems_daemon_has_a_directory_for_it() -> None:
    assert view_directory(Path("/run/syshax"), private=False) == Path("/run/syshax-view")
    assert view_directory(Path("/run/syshax"), private=True) == Path("/run/syshax")
    assert view_directory(Path("/tmp/x"), private=False) == Path("/tmp/x")
