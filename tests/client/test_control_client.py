"""The control API's client: answers, errors and broken daemons, each as the error tree has it."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syshax.control import Control
from syshax.errors import (
    ERRORS,
    DaemonAbsentError,
    DaemonLostError,
    InternalError,
    RequestTimeoutError,
    SyshaxError,
    VersionError,
)
from syshax.protocol import ConfigChangeAnswer, ConfigSetRequest, LoadRequest, ModelsAnswer, UnloadAnswer

Reply = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    reply: Reply
    seen: list[tuple[str, str, Any]]

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        type(self).seen.append((self.command, self.path, body))
        type(self).reply(self)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def handler(runtime_dir: Path) -> Iterator[type[Handler]]:
    fresh = type("FreshHandler", (Handler,), {"seen": []})
    with Server(str(runtime_dir / "control.sock"), fresh) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield fresh
        server.shutdown()


def answer(status: int, body: Any) -> Reply:
    def reply(handler: Handler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return reply


def test_every_verb(handler: type[Handler], runtime_dir: Path) -> None:
    control = Control(runtime_dir)
    handler.reply = answer(200, {"boot_id": "b", "models": [], "of a newer daemon": 1})
    assert control.get("/v1/models", ModelsAnswer).boot_id == "b"
    handler.reply = answer(200, {"boot_id": "b", "models": []})
    assert control.post("/v1/models", LoadRequest(name="n", path="/p"), ModelsAnswer).models == []
    assert control.post("/v1/config/reload", None, ModelsAnswer).models == []
    handler.reply = answer(200, {"boot_id": "b", "applied": ["a.b"], "needs_restart": []})
    changed = control.patch("/v1/config", ConfigSetRequest(values={"a.b": None}), ConfigChangeAnswer)
    assert changed.applied == ["a.b"]
    handler.reply = answer(200, {"boot_id": "b", "name": "n", "state": "unloading"})
    unloaded = control.delete("/v1/models/n?force=1", UnloadAnswer)
    assert unloaded is not None and unloaded.state == "unloading"
    handler.reply = answer(204, b"")
    assert control.delete("/v1/sessions/3") is None
    handler.reply = answer(200, "µ 1\n".encode())
    assert control.text("/metrics") == "µ 1\n"
    assert handler.seen == [
        ("GET", "/v1/models", None),
        ("POST", "/v1/models", {"name": "n", "path": "/p"}),
        ("POST", "/v1/config/reload", None),
        ("PATCH", "/v1/config", {"values": {"a.b": None}}),
        ("DELETE", "/v1/models/n?force=1", None),
        ("DELETE", "/v1/sessions/3", None),
        ("GET", "/metrics", None),
    ]


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_error_arrives_as_its_class(handler: type[Handler], runtime_dir: Path, code: str) -> None:
    handler.reply = answer(
        ERRORS[code].http_status, {"error": {"code": code, "message": "what is wrong", "hint": "what helps"}}
    )
    with pytest.raises(SyshaxError) as error:
        Control(runtime_dir).get("/v1/models", ModelsAnswer)
    assert type(error.value) is ERRORS[code]
    assert (error.value.message, error.value.hint) == ("what is wrong", "what helps")


def test_no_daemon(runtime_dir: Path) -> None:
    with pytest.raises(DaemonAbsentError, match="systemctl start syshaxd"):
        Control(runtime_dir).text("/metrics")


def test_answers_that_make_no_sense(handler: type[Handler], runtime_dir: Path) -> None:
    control = Control(runtime_dir, timeout=0.3)
    handler.reply = answer(500, b"<html>oh</html>")
    with pytest.raises(InternalError, match="answered 500 without an error body: '<html>oh"):
        control.get("/v1/models", ModelsAnswer)
    for body in (b"", b"not json", {"boot_id": 3, "models": []}, {"boot_id": "b"}, []):
        handler.reply = answer(200, body)
        with pytest.raises(VersionError, match="GET /v1/models is not a ModelsAnswer"):
            control.get("/v1/models", ModelsAnswer)
    handler.reply = lambda h: h.wfile.write(b"no http at all\r\n\r\n")
    with pytest.raises(DaemonLostError):
        control.get("/v1/models", ModelsAnswer)
    handler.reply = lambda h: h.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(DaemonLostError, match="went away"):
        control.get("/v1/models", ModelsAnswer)

    def half(h: Handler) -> None:
        h.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        h.connection.shutdown(socket.SHUT_RDWR)

    handler.reply = half
    with pytest.raises(DaemonLostError):
        control.get("/v1/models", ModelsAnswer)
    gate = threading.Event()
    handler.reply = lambda h: gate.wait(5) and None
    with pytest.raises(RequestTimeoutError, match=r"within 0.3 s"):
        control.get("/v1/models", ModelsAnswer)
    gate.set()
