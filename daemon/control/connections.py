"""Connections to the control socket: how many, and for how long.

aiohttp lets a connection that says nothing, or half of a request, stay for ever. Owns the bounds that keep one client
from holding what others need: so many connections for each user, so much time for the head of a request and, after its
answer, for reading that and asking again. While a request is being answered nothing is timed here: a body has its own
limit (app.py), and a route may take as long as it takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from syshax.errors import LimitError
from syshax.protocol import ErrorAnswer, ErrorBody
from syshaxd.peers import peer_of

PER_USER = 64
IN_ALL = 512
"""Root and the daemon's own user come in also when others hold so many."""
HEAD_SECONDS = 10.0
"""From the connection's begin to the end of its first request's head."""
QUIET_SECONDS = 30.0
"""From an answer to the end of the next request's head."""

REFUSED_SECONDS = 1.0
"""A refused client may say what it wanted: closed before, it would lose the refusal to a broken pipe or a reset ..."""
REFUSED_AT_ONCE = 32
"""... and the one that has had the longest time for it gives way to the next."""
_UNREAD_BYTES = 1 << 18
"""As much as a Unix socket holds."""


class NoHttp(logging.Filter):
    """Makes one line of aiohttp's report, traceback and all, of bytes that are no HTTP: their client's fault."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            text = " ".join(str(error).split())
            record.msg, record.args, record.exc_info = "a control request cannot be read: %.200s", (text,), None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


http_log = logging.getLogger("syshaxd.control.http")
http_log.addFilter(NoHttp())


def take_any_target(server: web.Server) -> None:
    """aiohttp's parser lets some requests without a target pass (met in two million mutated ones) and then fails on
    them itself, with a traceback and no answer. They ask for "/" now."""
    make = server.request_factory

    def made(message: Any, *rest: Any) -> Any:
        return make(message if message.url is not None else message._replace(url=URL("/"), path="/"), *rest)

    server.request_factory = made


class Connections:
    """`wrap` makes the protocol of each connection out of aiohttp's."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._refused: dict[Connection, None] = {}
        """Those that may still say what they wanted, the oldest first."""

    def wrap(self, serve: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        return lambda: Connection(self, serve)

    def enter(self, uid: int) -> str:
        """Why not; empty: it may stay, until leave()."""
        if self._users[uid] >= PER_USER:
            return f"user {uid} has {PER_USER} connections to the control socket"
        if self._users.total() >= IN_ALL and uid not in (0, os.geteuid()):
            return f"there are {IN_ALL} connections to the control socket"
        self._users[uid] += 1
        return ""

    def leave(self, uid: int) -> None:
        self._users[uid] -= 1
        if not self._users[uid]:
            del self._users[uid]

    def refuse(self, connection: Connection) -> None:
        if len(self._refused) >= REFUSED_AT_ONCE:
            self.forget(oldest := next(iter(self._refused)))
            oldest.end()
        self._refused[connection] = None

    def forget(self, connection: Connection) -> None:
        self._refused.pop(connection, None)


class Connection(asyncio.Protocol):
    """Hands everything to aiohttp's protocol; the transport's `get_protocol()` finds this one."""

    def __init__(self, all_of_them: Connections, serve: Callable[[], asyncio.Protocol]) -> None:
        self._all, self._serve = all_of_them, serve
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._uid = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport = transport
        uid = peer_of(transport.get_extra_info("socket")).uid
        if reason := self._all.enter(uid):
            transport.write(_refusal(reason))
            self._all.refuse(self)
            self._time(REFUSED_SECONDS)
            return
        self._uid = uid
        self._inner = self._serve()
        self._inner.connection_made(transport)
        self._time(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        if self._inner is not None:
            self._inner.connection_lost(error)
            self._all.leave(self._uid)
        self._all.forget(self)

    def request_began(self) -> None:
        self._stop_timer()

    def request_ended(self) -> None:
        self._time(QUIET_SECONDS)

    def _time(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Nothing is said: whoever sends half of a request and waits is no reader of errors.

        What has come is read first: unread, it would reset the connection and take a refusal with it.
        """
        if self._transport is not None:
            with suppress(OSError):
                os.read(self._transport.get_extra_info("socket").fileno(), _UNREAD_BYTES)
            self._transport.abort()


def _refusal(reason: str) -> bytes:
    error = LimitError(reason, "close some of them")
    body = ErrorAnswer(error=ErrorBody(code=error.code, message=error.message, hint=error.hint)).model_dump_json()
    head = f"HTTP/1.1 {error.http_status} Too Many Requests\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()
