"""/console: a page that shows the front-end, its workers and the daemon live.

A browser cannot send a key when it opens a page, so without one /console answers 401 with the page as the body, which
asks for it: page, script and style are static and say nothing. What there is to see comes from /console/events, which
asks for a key as every other route does; the script reads that with fetch, which can send one.

One sampler feeds all watchers of a process and stops with the last of them: nothing is computed while nobody looks.
What a watcher has not read in time is replaced by what came after, so slow ones hold nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import cache
from http import HTTPStatus
from importlib import resources
from time import monotonic
from typing import Any

from aiohttp import web

from syshaxd.frontend.console_data import History
from syshaxd.frontend.errors import SERVER, ApiError, Kind
from syshaxd.frontend.metrics import Metrics
from syshaxd.frontend.workers import Workers

log = logging.getLogger("syshax.api")
EVENTS = "/console/events"
SAMPLE_SECONDS = 1.0
WATCHERS = 64
"""At most so many at a time in one process."""
_PAGES = {
    "/console": ("console.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Server": SERVER,
}


@cache
def _static(name: str) -> bytes:
    return (resources.files("syshaxd.frontend") / "static" / name).read_bytes()


def page(path: str, method: str, signed_in: bool) -> web.Response | None:
    """What stands at a path of the console that says nothing by itself; None: nothing does."""
    if path not in _PAGES:
        return None
    if method not in ("GET", "HEAD"):
        raise ApiError(Kind.METHOD, f"{path} takes GET, not {method}.", headers=(("Allow", "GET"),))
    name, kind = _PAGES[path]
    response = web.Response(body=_static(name), headers=_HEADERS)
    response.headers["Content-Type"] = kind
    if path == "/console" and not signed_in:
        response.set_status(HTTPStatus.UNAUTHORIZED)
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


class _Watcher:
    """The newest event of each kind that it has not been sent."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self.pending: dict[str, bytes] = {}
        self.wake = asyncio.Event()
        self._transport = transport

    def tell(self, kind: str, event: bytes) -> None:
        self.pending[kind] = event
        self.wake.set()

    def end(self) -> None:
        """It finds out that it is over; one that does not read what it was sent never would, and is cut off."""
        self.wake.set()
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()


class Console:
    """The watchers and what they are shown."""

    def __init__(self, metrics: Metrics, workers: Workers) -> None:
        self._over = False
        self._history = History(metrics, workers)
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None

    async def events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Server-sent events: `hello` with the past, `sample` each second, `experts` each few seconds."""
        if len(self._watchers) >= WATCHERS:
            raise ApiError(
                Kind.OVERLOADED, f"{WATCHERS} consoles are open, the limit.", headers=(("Retry-After", "10"),)
            )
        response = web.StreamResponse(status=HTTPStatus.OK, headers={**_HEADERS, "Cache-Control": "no-store"})
        response.headers["Content-Type"] = "text/event-stream"
        response.headers["X-Accel-Buffering"] = "no"  # nginx passes it on at once
        response.force_close()
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        watcher = _Watcher(request.transport)
        watcher.tell("hello", _event("hello", self._history.past()))
        self._watchers.add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._sample())
        try:
            while True:
                await watcher.wake.wait()
                if self._over:
                    break
                watcher.wake.clear()
                events, watcher.pending = watcher.pending, {}
                await response.write(b"".join(events.values()))
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None
        return response

    def close(self) -> None:
        """Ends what all watchers are shown, at once."""
        self._over = True
        for watcher in self._watchers:
            watcher.end()

    async def _sample(self) -> None:
        """Until it is cancelled, with the last watcher."""
        due = monotonic()
        while True:
            try:
                sample, experts = await self._history.sample()
                self._publish("sample", sample)
                if experts is not None:
                    self._publish("experts", experts)
            except Exception:
                log.exception("the console's sample failed")
            due = max(due + SAMPLE_SECONDS, monotonic())
            await asyncio.sleep(due - monotonic())

    def _publish(self, kind: str, value: Any) -> None:
        event = _event(kind, value)
        for watcher in self._watchers:
            watcher.tell(kind, event)


def _event(kind: str, value: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
