"""One run of syshax-api as a single process: sockets, signals, systemd.

SIGTERM or SIGINT: stop accepting, finish what runs up to timeouts.drain_seconds, exit 0; a second one exits at once.
SIGHUP: read the API keys again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from syshaxd.frontend.acceptor import Acceptor
from syshaxd.frontend.app import App
from syshaxd.frontend.board import Board
from syshaxd.frontend.commands import Commands, reload_and_tell
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.control import Control
from syshaxd.frontend.fleet import Fleet
from syshaxd.frontend.keys import KeyRing
from syshaxd.frontend.listening import address_of, listen
from syshaxd.frontend.server import Server
from syshaxd.systemd import Notifier, take_handed, watchdog_seconds

log = logging.getLogger("syshax.api")
FIRST_LOOK_SECONDS = 2.0
"""Whoever is answered first, perhaps the client that had systemd start us, is to find the workers that are there."""


def key_ring(config: ApiConfig, rows: dict[str, Any] | None = None) -> KeyRing | None:
    """The configured keys, or those of a supervisor's ring. `ConfigError` when they cannot be read."""
    return KeyRing(Path(config.keys_file), rows) if config.keys_file else None


def readiness(app: App) -> str:
    """In a few words, for systemd's status line."""
    return app.workers.unready_reason() or f"ready: {', '.join(app.workers.models())}"


class Stop:
    """Signals that end a process: the first begins it, the second does not wait."""

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self._event, self._at_once = asyncio.Event(), at_once
        self.wait = self._event.wait
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._event.is_set():
            log.warning("second signal: leaving at once")
            self._at_once()
            os._exit(1)
        self._event.set()


async def keep_alive(notifier: Notifier) -> None:
    """Answers systemd's watchdog as long as this loop turns."""
    if seconds := watchdog_seconds():
        while True:
            notifier.alive()
            await asyncio.sleep(seconds / 3)


class Process:
    """From sockets to exit status."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._keys = key_ring(config)
        self._notifier = Notifier()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serves until a signal; the exit status. `ConfigError` when it cannot listen."""
        handed = [given for _, given in take_handed().sockets]
        listeners = handed or listen(self._config)  # what is wrong with the address is said before anything else
        server = Server(self._config, self._keys, Board())
        await server.start()
        try:
            stop = Stop()
            commands = Commands(server, self._config.timeouts.drain_seconds)

            async def ask_all(name: str, **fields: Any) -> list[Any]:
                return [await commands.do(name, **fields)]

            control = Control(self._config, Fleet(self._config, ask_all))
            await control.start()
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, lambda: self._keep(reload_and_tell(lambda: commands.do("reload")))
            )
            server.app.workers.start()
            await server.app.workers.first_look(FIRST_LOOK_SECONDS)
            for listener in listeners:
                await Acceptor(server.runner, listener).start()
            log.info("listening on %s", ", ".join(address_of(listener) for listener in listeners))
            self._notifier.ready("listening")
            self._keep(self._report(server.app))
            self._keep(keep_alive(self._notifier))
            await stop.wait()
            await control.close()
            self._notifier.stopping(f"finishing {len(server.app.proxy.active)} requests")
            await server.drain()
        finally:
            for task in self._tasks:
                task.cancel()
            await server.close()
        log.info("stopped")
        return 0

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, app: App) -> None:
        """Keeps systemd's status line true."""
        while True:
            self._notifier.status(readiness(app))
            await asyncio.sleep(1)


def raise_file_limit() -> None:
    """Two descriptors a stream: the soft limit of 1024 is too low, the hard one is ours to use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs it on uvloop where that is installed."""
    factory: Any = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    raise_file_limit()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
