"""Takes connections in where one process serves alone, as many at a time as there are.

libuv takes one each time around the loop (since 1.45). With 2,000 streams one time around is a tenth of a second, so
that of as many clients that come at once the last would wait for minutes, connected and unanswered.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web

from syshaxd.frontend.listening import BACKLOG

log = logging.getLogger("syshax.api")
_AT_ONCE = 128
"""Then the others have their turn."""
_PAUSE_SECONDS = 0.5
"""When the system has no room for one more."""


class Acceptor(web.BaseSite):
    """A site of aiohttp's runner on a listening socket that is there."""

    def __init__(self, runner: web.ServerRunner, listener: socket.socket) -> None:
        super().__init__(runner)
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._arriving: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._stopping = False

    @property
    def name(self) -> str:
        return f"descriptor {self._listener.fileno()}"

    async def start(self) -> None:
        await super().start()
        self._listener.setblocking(False)
        self._watch()

    async def stop(self) -> None:
        """What the kernel has accepted for us is served still."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        self._stopping = True
        for _ in range(BACKLOG // _AT_ONCE):
            if not self._take():
                break
        self._listener.close()
        if self._arriving:
            await asyncio.gather(*self._arriving, return_exceptions=True)
        await super().stop()

    def _watch(self) -> None:
        self._loop.add_reader(self._listener, self._take)

    def _take(self) -> bool:
        """Whether there may be more."""
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionError:
                continue  # it was gone before
            except OSError as error:
                log.error("no connection can be taken in: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                if not self._stopping:
                    self._pause = self._loop.call_later(_PAUSE_SECONDS, self._watch)
                return False
            task = self._loop.create_task(self._serve(connection))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)
        return True

    async def _serve(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(server, connection)
        except OSError:
            connection.close()  # it was gone before
