"""The process around the front-end: sockets, signals, draining. Everything about HTTP itself is in `app`.

SIGTERM or SIGINT: stop accepting, finish what runs up to timeouts.drain_seconds, exit 0; a second one exits at once.
SIGHUP: read the API keys again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from syshax.errors import ConfigError
from syshaxd.frontend.app import App
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.errors import ApiError, Kind
from syshaxd.frontend.keys import KeyRing
from syshaxd.systemd import Notifier, take_handed

log = logging.getLogger("syshax.api")
_FIRST_LOOK_SECONDS = 2.0
"""Whoever is answered first, perhaps the client that had systemd start us, is to find the workers that are there."""
_LAST_REQUEST_SECONDS = 0.25
"""A request that is on its way as we stop, on a connection that we hold, still gets its answer and then the close."""
_BACKLOG = 4096
"""Connections that wait to be taken in; a burst of more would be dropped, and hang until the client tries again."""
_BREAK_OFF_SECONDS = 2.0
"""For the error events of what draining cut, to reach their clients."""


class _Connection(web.RequestHandler):
    """aiohttp's connection; malformed HTTP gets an OpenAI error object too."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionError("the client is gone, or an answer has begun")
        if status >= 500:
            log.error("answering failed", exc_info=exc)
            error = ApiError(Kind.INTERNAL, "An internal error of syshax-api; its log has the details.")
        else:
            log.debug("malformed HTTP from %s: %s", request.remote, message)
            first_line = (message or str(exc)).strip().splitlines()[0]
            error = ApiError(Kind.BAD_REQUEST, f"This is not valid HTTP: {first_line.rstrip(':')}.")
        response = error.response()
        response.force_close()
        return response

    def drain(self) -> None:
        """No request after the one in progress; without one the connection closes now."""
        self.close()
        if not self._request_in_progress and not self._messages:
            self.force_close()


class _Connections(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


def make_server(app: App, config: ApiConfig) -> web.Server:
    """aiohttp's server for the app: bodies stay encoded, a client that leaves cancels its request."""
    return _Connections(
        app.handle,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        keepalive_timeout=config.timeouts.keepalive_seconds,
        max_line_size=int(config.limits.header),
        max_field_size=int(config.limits.header),
        max_headers=config.limits.headers,
    )


def _address(address: object) -> str:
    if not isinstance(address, tuple):
        return f"unix:{address}"
    return f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"


class Process:
    """One run of syshax-api, from sockets to exit status."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._keys = KeyRing(Path(config.keys_file)) if config.keys_file else None
        self._notifier = Notifier()
        self._stop = asyncio.Event()
        self.addresses: list[str] = []

    async def run(self) -> int:
        """Serves until a signal; the exit status. `ConfigError` when it cannot listen."""
        raise_file_limit()
        app = App(self._config, self._keys)
        runner = web.ServerRunner(make_server(app, self._config), shutdown_timeout=_BREAK_OFF_SECONDS)
        await runner.setup()
        status = asyncio.create_task(self._report(app))
        try:
            self._handle_signals()
            handed = [given for _, given in take_handed().sockets]
            if not handed:  # what is wrong with the address is said before anything else
                await self._listen(web.TCPSite(runner, self._config.host, self._config.port, backlog=_BACKLOG))
            app.workers.start()
            await app.workers.first_look(_FIRST_LOOK_SECONDS)
            await self._listen(*(web.SockSite(runner, given) for given in handed))
            self.addresses += [_address(address) for address in runner.addresses]
            log.info("listening on %s", ", ".join(self.addresses))
            self._notifier.ready("listening")
            await self._stop.wait()
            status.cancel()
            await self._drain(app, runner)
        finally:
            status.cancel()
            await runner.cleanup()
            await app.workers.close()
        log.info("stopped")
        return 0

    async def _listen(self, *sites: web.BaseSite) -> None:
        try:
            for site in sites:
                await site.start()
        except OSError as error:
            raise self._cannot_listen(error) from None

    def _cannot_listen(self, error: OSError) -> ConfigError:
        where = f"cannot listen on {self._config.host}:{self._config.port}"
        if isinstance(error, socket.gaierror):
            return ConfigError(f"{where}: {error.strerror}", "host must be an address or name of this machine")
        hints = {
            errno.EADDRINUSE: "another program listens there: stop it, or choose another --port",
            errno.EACCES: "ports below 1024 need the capability CAP_NET_BIND_SERVICE, or socket activation",
            errno.EADDRNOTAVAIL: "host must be an address of this machine (`ip address` lists them)",
        }
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        return ConfigError(f"{where}: {reason}", hints.get(error.errno or 0, ""))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)

    def _on_stop(self) -> None:
        if self._stop.is_set():
            log.warning("second signal: leaving at once")
            os._exit(1)
        self._stop.set()

    def _on_reload(self) -> None:
        if self._keys is None:
            log.info("SIGHUP: nothing to reload, keys_file is not set")
            return
        try:
            self._keys.reload()
        except ConfigError as error:
            log.error("SIGHUP: the old keys stay: %s", error)
        else:
            log.info("SIGHUP: %d API keys", len(self._keys))

    async def _report(self, app: App) -> None:
        """Keeps systemd's status line true."""
        while True:
            reason = app.workers.unready_reason()
            self._notifier.status(reason or f"ready: {', '.join(app.workers.models())}")
            await asyncio.sleep(1)

    async def _drain(self, app: App, runner: web.ServerRunner) -> None:
        seconds = self._config.timeouts.drain_seconds
        self._notifier.stopping(f"finishing {len(app.proxy.active)} requests")
        log.info("stopping: %d requests have %g s to finish", len(app.proxy.active), seconds)
        app.proxy.draining = True
        await asyncio.sleep(0)  # what the kernel has accepted for us
        for site in list(runner.sites):
            await site.stop()
        await asyncio.sleep(min(_LAST_REQUEST_SECONDS, seconds))
        for connection in runner.server.connections if runner.server else ():
            if isinstance(connection, _Connection):
                connection.drain()
        if await _idle_within(app, seconds):
            return
        log.warning("ending %d requests that did not finish in time", len(app.proxy.active))
        for exchange in list(app.proxy.active):
            exchange.end(ApiError(Kind.SHUTTING_DOWN, "The server is shutting down; send the request again."))
        await _idle_within(app, _BREAK_OFF_SECONDS)


async def _idle_within(app: App, seconds: float) -> bool:
    idle = asyncio.Event()
    app.proxy.on_idle = idle.set
    if app.proxy.active:
        with suppress(TimeoutError):
            await asyncio.wait_for(idle.wait(), seconds)
    return not app.proxy.active


def raise_file_limit() -> None:
    """Two descriptors a stream: the soft limit of 1024 is too low, the hard one is ours to use."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(config: ApiConfig) -> int:
    """Runs the process on uvloop where it is installed. `ConfigError` for keys or addresses that do not work."""
    factory: Any = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop

    async def main() -> int:
        return await Process(config).run()

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
