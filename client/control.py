"""The control API's client: blocking HTTP and JSON over the daemon's Unix socket.

Owns one call's trip: connect, send, read, and the translation of every failure into the error tree. One connection
for each call, so that a restarted daemon is met without ado. Knows no route; callers name the answer's model.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from syshax.errors import DaemonLostError, InternalError, RequestTimeoutError, VersionError, error_from_code
from syshax.front import FRONT_SOCKET, FRONT_SOCKET_VARIABLE
from syshax.protocol import CONTROL_SOCKET, ErrorAnswer
from syshax.sockets import connect, runtime_directory

Message = TypeVar("Message", bound=BaseModel)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, connection: socket.socket) -> None:
        super().__init__("localhost")
        self.sock = connection


class Control:
    """`Control(runtime_dir).get("/v1/status", StatusAnswer)`.

    Every method raises the error that the daemon answered with (as the class of `syshax.errors`), DaemonAbsentError,
    NotAllowedError, DaemonLostError (gone before the answer was whole), RequestTimeoutError, or VersionError (an answer
    that this version cannot read). Thread-safe: it holds no connection.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str] | None = None, timeout: float = 30.0) -> None:
        self.path = runtime_directory(runtime_dir) / CONTROL_SOCKET
        self.timeout = timeout
        self.service = "syshaxd"

    @classmethod
    def of_front(cls, path: Path | None, timeout: float) -> Control:
        """That of syshax-api, on this socket, else $SYSHAX_API_SOCKET, else the usual one."""
        control = cls(timeout=timeout)
        control.path = path or Path(os.environ.get(FRONT_SOCKET_VARIABLE) or FRONT_SOCKET)
        control.service = "syshax-api"
        return control

    def get(self, path: str, answer: type[Message]) -> Message:
        return self._read("GET", path, None, answer)

    def post(self, path: str, body: BaseModel | None, answer: type[Message]) -> Message:
        return self._read("POST", path, body, answer)

    def patch(self, path: str, body: BaseModel, answer: type[Message]) -> Message:
        return self._read("PATCH", path, body, answer)

    def delete(self, path: str, answer: type[Message] | None = None) -> Message | None:
        """The answer, or None where no model is given."""
        if answer is None:
            self._call("DELETE", path, None)
            return None
        return self._read("DELETE", path, None, answer)

    def text(self, path: str) -> str:
        """The body as it is, for /metrics."""
        return self._call("GET", path, None).decode("utf-8")

    def _read(self, method: str, path: str, body: BaseModel | None, answer: type[Message]) -> Message:
        data = self._call(method, path, body)
        try:
            return answer.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            raise VersionError(
                f"the answer to {method} {path} is not a {answer.__name__}: {where}: {first['msg']}",
                "install the same version of client and daemon",
            ) from None

    def _call(self, method: str, path: str, body: BaseModel | None) -> bytes:
        data = None if body is None else body.model_dump_json(exclude_unset=True).encode()
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if data is not None else {})
        connection = _UnixConnection(connect(self.path, socket.SOCK_STREAM, self.timeout, self.service))
        try:
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise RequestTimeoutError(
                f"{method} {path}: {self.service} did not answer within {self.timeout:g} s",
                "is the daemon stopped or stuck?",
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise DaemonLostError(f"{method} {path}: {self.service} went away before it answered ({error})") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _answered_error(f"{method} {path}: {self.service}", response.status, content)
        return content


def _answered_error(who: str, status: int, content: bytes) -> Exception:
    try:
        body = ErrorAnswer.model_validate(json.loads(content)).error
    except (ValueError, ValidationError):
        text = content[:200].decode("utf-8", "replace")
        return InternalError(f"{who} answered {status} without an error body: {text!r}")
    return error_from_code(body.code, body.message, body.hint)
