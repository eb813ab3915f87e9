"""What supervisor and child say to each other: JSON lines over a socket pair, questions with answers and remarks.

Owns the form and the end of it: when one side is gone, whoever waits for an answer learns so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from syshax.errors import InternalError, SyshaxError, error_from_code

log = logging.getLogger("syshax.api")
_LINE_BYTES = 64 << 20
Answer = Callable[..., Awaitable[Any]]


class Channel:
    """One end. `serve` must run for anything to arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_LINE_BYTES))

    async def ask(self, name: str, **fields: Any) -> Any:
        """The other side's answer. Raises the error that it answered with, `ConnectionError` when it is gone."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, "name": name, "fields": fields})
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def tell(self, name: str, **fields: Any) -> None:
        """Without an answer; nothing happens when the other side is gone."""
        with suppress(ConnectionError):
            self._send({"ask": 0, "name": name, "fields": fields})

    async def serve(self, answer: Answer) -> None:
        """Answers with `answer(name, **fields)` until the other side is gone."""
        try:
            with suppress(ConnectionError):
                while line := await self._reader.readline():
                    self._take(json.loads(line), answer)
        finally:
            self._writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError("the other process is gone"))

    def _take(self, message: dict[str, Any], answer: Answer) -> None:
        if "ask" in message:
            task = asyncio.get_running_loop().create_task(self._answer(message, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (waiting := self._waiting.get(message["answer"])) is not None and not waiting.done():
            if "error" in message:
                waiting.set_exception(error_from_code(*message["error"]))
            else:
                waiting.set_result(message["value"])

    async def _answer(self, message: dict[str, Any], answer: Answer) -> None:
        reply: dict[str, Any] = {"answer": message["ask"]}
        try:
            reply["value"] = await answer(message["name"], **message["fields"])
        except SyshaxError as error:
            reply["error"] = (error.code, error.message, error.hint)
        except Exception:
            log.exception("%s failed", message["name"])
            reply["error"] = (InternalError.code, f"{message['name']} failed", "the log has the details")
        if message["ask"]:
            with suppress(ConnectionError):
                self._send(reply)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the other process is gone")
        self._writer.write(json.dumps(message).encode() + b"\n")
