"""syshax-api as a program of its own, for tests of its processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from front_fixtures import until

API = [sys.executable, "-m", "syshaxd.frontend"]


class Api:
    """syshax-api as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""

    async def follow(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())
            if "listening on " in self.lines[-1]:
                self.url = self.lines[-1].split("listening on ")[1]

    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    async def ready(self) -> None:
        await until(lambda: bool(self.url) or self.process.returncode is not None, 30)
        assert self.url, self.log
        await until(lambda: " is ready: " in self.log, 10)

    def children(self) -> list[int]:
        """Pids of its processes."""
        try:
            return sorted(
                map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())
            )
        except FileNotFoundError:
            return []

    async def ended(self, seconds: float) -> int:
        async with asyncio.timeout(seconds):
            return await self.process.wait()


@asynccontextmanager
async def api(
    *arguments: str, environment: dict[str, str] | None = None, listener: socket.socket | None = None
) -> AsyncIterator[Api]:
    """Started; `listener` is handed over as systemd does."""
    command, descriptors = [*API, *arguments], ()
    if listener is not None:
        descriptors = (listener.fileno(),)
        script = f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
        command = ["bash", "-c", script, "bash", *command]
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, **(environment or {})}, pass_fds=descriptors
    )
    started = Api(process)
    follower = asyncio.create_task(started.follow())
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await follower
