"""Connections that say nothing, half of something, or come in floods: on either socket, others are served on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request
from conftest import Daemon, eventually

from syshax.protocol import StatusAnswer
from syshaxd import waiting
from syshaxd.control import connections
from syshaxd.peers import Peer, peer_of

REQUEST = json.dumps({"model": "tiny", "client": "test", "max_tokens": 16}).encode()


class Users:
    """Connections that begin while `uid` is set are that user's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uid = 0
        for module in ("sessions", "control.connections"):
            monkeypatch.setattr(f"syshaxd.{module}.peer_of", self.peer)

    def peer(self, connection: Any) -> Peer:
        return Peer(peer_of(connection).pid, self.uid, self.uid, frozenset())


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Users:
    return Users(monkeypatch)


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    found: list[socket.socket] = []
    yield found
    for connection in found:
        connection.close()


def dial_control(daemon: Daemon) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect(str(daemon.runtime_dir / "control.sock"))
    return connection


async def received(connection: socket.socket) -> bytes:
    """Until the daemon ends it; a reset counts as the end."""
    data = b""
    try:
        while more := await asyncio.to_thread(connection.recv, 65536):
            data += more
    except ConnectionResetError:
        pass
    return data


async def serves(daemon: Daemon) -> None:
    assert (await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)).state == "ready"


# ------------------------------------------------------------------ attach socket


async def test_a_flood_of_silent_clients_of_one_user_does_not_keep_others_from_attaching(
    daemon: Daemon, users: Users, opened: list[socket.socket]
) -> None:
    users.uid = 1000
    for _ in range(3 * waiting.PER_USER):
        opened.append(daemon.dial())
        await asyncio.sleep(0)
    await eventually(lambda: len(daemon.server.parts.sessions._waiting) == waiting.PER_USER, "the flood")
    users.uid = 1001
    began = time.monotonic()
    connection, answer, _ = await daemon.attach(REQUEST)
    assert "session_id" in answer and time.monotonic() - began < 2, "at once, not when the flood's time is up"
    opened.append(connection)
    last = json.loads(await asyncio.to_thread(opened[0].recv, 4096))["error"]
    assert last["code"] == "limit" and "newer connections" in last["message"]


async def test_many_users_cannot_fill_the_attach_socket(
    daemon: Daemon, users: Users, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "IN_ALL", 20)
    for uid in range(1000, 1030):
        users.uid = uid
        opened.append(daemon.dial())
        await asyncio.sleep(0.005)
    await eventually(lambda: len(daemon.server.parts.sessions._waiting) == 20, "the flood")
    users.uid = 7
    connection, answer, _ = await daemon.attach(REQUEST)
    assert "session_id" in answer
    opened.append(connection)


async def test_a_burst_of_clients_that_speak_is_served_whole(daemon: Daemon, opened: list[socket.socket]) -> None:
    """More than may wait, at once, as when a daemon comes back: all have said what they want."""
    await daemon.json("PATCH", "/v1/config", {"values": {"limits.sessions": 200}})
    for _ in range(100):
        opened.append(daemon.dial())
        opened[-1].send(REQUEST)
    for connection in opened:
        answer, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, 65536, 4)
        assert b"session_id" in answer
        for descriptor in descriptors:
            socket.close(descriptor)
    assert len(daemon.server.parts.sessions) == 100


# ------------------------------------------------------------------ control socket


@pytest.mark.parametrize("sent", [b"", b"GET /v1/st", b"GET /v1/status HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
async def test_half_a_request_is_not_waited_for(
    daemon: Daemon, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    connection = dial_control(daemon)
    opened.append(connection)
    connection.sendall(sent)
    began = time.monotonic()
    assert await received(connection) == b"" and time.monotonic() - began < 5
    await serves(daemon)


async def test_a_request_that_trickles_in_is_not_waited_for(
    daemon: Daemon, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    connection = dial_control(daemon)
    opened.append(connection)
    ended = False
    for letter in b"GET /v1/status HTTP/1.1\r\nX-Slow: " + b"x" * 200:
        try:
            connection.sendall(bytes([letter]))
        except (BrokenPipeError, ConnectionResetError):
            ended = True
            break
        await asyncio.sleep(0.02)
    assert ended
    await serves(daemon)


async def test_a_body_that_does_not_come_and_an_answer_that_is_not_read(
    daemon: Daemon, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syshaxd.control.app.BODY_SECONDS", 0.3)
    monkeypatch.setattr(connections, "QUIET_SECONDS", 0.5)
    connection = dial_control(daemon)
    opened.append(connection)
    connection.sendall(b"PATCH /v1/config HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b"did not come within" in await received(connection)
    deaf = dial_control(daemon)
    opened.append(deaf)
    deaf.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            deaf.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
            await asyncio.sleep(0)
    await serves(daemon)
    await asyncio.sleep(1.5)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        deaf.send(b"x")


async def test_a_connection_that_asks_again_in_time_is_kept_and_a_quiet_one_is_not(
    daemon: Daemon, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "QUIET_SECONDS", 0.5)
    connection = dial_control(daemon)
    opened.append(connection)
    for _ in range(4):
        connection.sendall(b"GET /v1/sessions HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await asyncio.to_thread(connection.recv, 65536)
        await asyncio.sleep(0.3)
    assert await received(connection) == b""


async def test_a_slow_answer_is_not_cut_short(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connections, "QUIET_SECONDS", 0.2)
    body = daemon.server.parts.cache.answer

    def slow(boot_id: str) -> Any:
        time.sleep(0.8)
        return body(boot_id)

    monkeypatch.setattr(daemon.server.parts.cache, "answer", slow)
    assert (await daemon.json("GET", "/v1/cache"))[0] == 200


async def test_one_users_connections_are_bounded_and_others_are_served(
    daemon: Daemon, users: Users, opened: list[socket.socket]
) -> None:
    users.uid = 1000
    opened += [dial_control(daemon) for _ in range(connections.PER_USER)]
    await asyncio.sleep(0.1)
    refused = dial_control(daemon)
    opened.append(refused)
    answer = await received(refused)
    assert answer.startswith(b"HTTP/1.1 429 ") and b'"code":"limit"' in answer and b"user 1000 has 64" in answer
    for _ in range(3 * connections.REFUSED_AT_ONCE):
        opened.append(dial_control(daemon))
        await asyncio.sleep(0)
    users.uid = 1001
    await serves(daemon)
    users.uid = 1000
    opened.pop(0).close()

    async def room() -> bool:
        return (await daemon.json("GET", "/v1/sessions"))[0] == 200

    await eventually(room, "a place for the next")


async def test_root_comes_in_when_others_hold_all_places(
    daemon: Daemon, users: Users, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IN_ALL", 10)
    for uid in range(1000, 1010):
        users.uid = uid
        opened.append(dial_control(daemon))
        await asyncio.sleep(0.01)
    users.uid = 2000
    assert (await daemon.json("GET", "/v1/sessions"))[0] == 429
    users.uid = 0
    await serves(daemon)


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_without_a_target_asks_for_the_root(known: bool) -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(text=f"{request.path} {request.raw_path}")

    server = web.Server(handle)
    connections.take_any_target(server)
    message = make_mocked_request("GET", "/x?y" if known else "/")._message
    if not known:
        message = message._replace(url=None, path="")
    request = server.request_factory(message, EMPTY_PAYLOAD, mock.Mock(), mock.Mock(), mock.Mock())
    assert (await handle(request)).text == ("/x /x?y" if known else "/ /")
