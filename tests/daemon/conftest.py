"""A daemon inside the test's event loop: the real server, sockets and files over a fake core."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from cached_models import checkpoint, rig
from checkpoints import write_checkpoint
from fake_core import FakeCore

from syshax.control import Control
from syshaxd.config_files import ConfigFiles
from syshaxd.server import Options, Server

__all__ = ["checkpoint", "rig"]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose sockets' paths fit into the kernel's limit."""
    with tempfile.TemporaryDirectory(prefix="sx") as folder:
        yield Path(folder)


async def eventually(check: Callable[[], Any], what: str = "it") -> None:
    """Until check() is true; it may be a coroutine function. At most 5 s."""
    for _ in range(500):
        result = check()
        if await result if isinstance(result, Awaitable) else result:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what} did not happen")


class Daemon:
    """A running server and ways to talk to it. Calls of `ask` run in a thread, as the client blocks."""

    def __init__(self, core: FakeCore, server: Server, runtime_dir: Path, config_file: Path, task: asyncio.Task[int]):
        self.core, self.server, self.runtime_dir, self.config_file, self.task = (
            core, server, runtime_dir, config_file, task,
        )  # fmt: skip
        self.control = Control(runtime_dir)

    async def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)

    async def http(
        self, method: str, path: str, body: bytes = b"", headers: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Raw HTTP: status, headers in small letters, body."""
        reader, writer = await asyncio.open_unix_connection(self.runtime_dir / "control.sock")
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        )
        writer.write(head.encode() + body)
        data = await reader.read()
        writer.close()
        top, _, content = data.partition(b"\r\n\r\n")
        lines = top.decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:])
        return int(lines[0].split()[1]), fields, content

    async def json(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, _, content = await self.http(method, path, b"" if body is None else json.dumps(body).encode())
        return status, json.loads(content)

    async def until(self, name: str, *states: str) -> Any:
        """The model's info when it is in one of the states."""
        for _ in range(500):
            status, info = await self.json("GET", f"/v1/models/{name}")
            if (info["state"] if status == 200 else "gone") in states:
                return info
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} did not become {states}: {info}")

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(5)
        connection.connect(str(self.runtime_dir / "attach.sock"))
        return connection

    async def attach(self, message: bytes | dict[str, Any]) -> tuple[socket.socket, dict[str, Any], list[int]]:
        """Sends one datagram and gives the connection, the answer and the descriptors with it."""
        connection = self.dial()
        data = message if isinstance(message, bytes) else json.dumps(message).encode()

        def exchange() -> tuple[bytes, list[int]]:
            connection.send(data)
            answer, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
            return answer, list(descriptors)

        answer, descriptors = await asyncio.to_thread(exchange)
        return connection, json.loads(answer) if answer else {}, descriptors

    async def stop(self) -> int:
        self.server.stop()
        return await self.task


@pytest_asyncio.fixture
async def start(short_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    """start(config text, core=..., user=True) -> Daemon; all are stopped at the end."""
    running: list[Daemon] = []

    async def begin(config: str = "", core: FakeCore | None = None, user: bool = True, name: str = "run") -> Daemon:
        config_file = short_dir / f"{name}.toml"
        config_file.write_text(config)
        core = core or FakeCore()
        files = ConfigFiles(config_file, True, short_dir / f"{name}-state")
        server = Server(core, Options(files, short_dir / name, user))
        task = asyncio.create_task(server.run())
        await server.serving.wait()
        running.append(Daemon(core, server, short_dir / name, config_file, task))
        return running[-1]

    yield begin
    for daemon in running:
        daemon.core.gate_load.set()
        if not daemon.task.done():
            await daemon.stop()


@pytest_asyncio.fixture
async def daemon(start: Callable[..., Any], tmp_path: Path) -> Daemon:
    """A daemon with one configured model, "tiny", loaded and ready."""
    write_checkpoint(tmp_path / "tiny")
    found: Daemon = await start(f'[models.tiny]\npath = "{tmp_path / "tiny"}"\nautoload = true\n')
    await found.until("tiny", "ready")
    return found
