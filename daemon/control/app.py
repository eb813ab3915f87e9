"""The control API's frame: one aiohttp application whose every answer, errors included, has the same form.

Owns the translation of errors, the boot id's header, body limits and the reading of JSON bodies. What the routes do is
routes.py's, who may use them rights.py's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from syshax.errors import InternalError, InvalidArgumentError, NotFoundError, SyshaxError, TooLargeError
from syshax.protocol import ErrorAnswer, ErrorBody
from syshaxd.control.connections import Connection, Connections
from syshaxd.quantities import human_size

log = logging.getLogger(__name__)
BACKLOG = 128
"""Connections that the kernel holds; asyncio accepts at most so many before it looks at the others."""
BOOT_ID_HEADER = "X-Syshax-Boot-Id"
BODY_SECONDS = 10.0
_MAX_BODY = 1 << 30
"""aiohttp's own bound; the configured one is checked here, since it is live."""

Message = TypeVar("Message", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_answer(message: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=message.model_dump_json(), content_type="application/json", status=status)


def printable(text: str) -> str:
    """A client's bytes that are no UTF-8 (they reach us as lone surrogates) as escapes: JSON cannot hold them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_answer(error: SyshaxError) -> web.Response:
    body = ErrorBody(code=error.code, message=printable(error.message), hint=printable(error.hint))
    return json_answer(ErrorAnswer(error=body), error.http_status)


async def read_body(request: web.Request, message: type[Message], limit: int) -> Message:
    """The body as that message. Raises InvalidArgumentError, naming the field, or TooLargeError."""
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(request.content_length, limit)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                data += chunk
                if len(data) > limit:
                    raise _too_large(len(data), limit)
    except TimeoutError:
        raise InvalidArgumentError(f"the body did not come within {BODY_SECONDS:g} s") from None
    except web.RequestPayloadError as error:
        raise InvalidArgumentError(f"the body cannot be read: {' '.join(str(error).split())}") from None
    except ConnectionResetError:
        raise InvalidArgumentError("the client left before its body was whole") from None
    try:
        return message.model_validate_json(bytes(data))
    except ValidationError as error:
        faults = [_fault(message, dict(detail)) for detail in error.errors(include_url=False)[:8]]
        raise InvalidArgumentError("; ".join(faults), f"fields: {', '.join(message.model_fields)}") from None


def _too_large(size: int, limit: int) -> TooLargeError:
    return TooLargeError(
        f"the body has {human_size(size)} or more, limits.control_body allows {human_size(limit)}",
        "syshaxctl config set limits.control_body ...",
    )


def _fault(message: type[BaseModel], detail: dict[str, object]) -> str:
    location = detail["loc"]
    where = ".".join(str(part) for part in location) if isinstance(location, tuple) else ""
    if detail["type"] == "extra_forbidden":
        return f"{where} is not a field of {message.__name__}"
    if detail["type"] == "json_invalid":
        return f"the body is not JSON: {detail['msg']}"
    seen = f" (value: {detail['input']!r:.100})" if where and detail["type"] != "missing" else ""
    return f"{where or 'the body'}: {detail['msg']}{seen}"


def make_app(
    cause_of: Callable[[Exception], Exception],
    boot_id: str,
    names: Sequence[str],
    add_routes: Callable[[web.UrlDispatcher], None],
) -> web.Application:
    """cause_of: what an exception means. names: the routes that an error for another one lists."""

    @web.middleware
    async def same_form(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = None if request.transport is None else request.transport.get_protocol()
        timed = connection if isinstance(connection, Connection) else None
        if timed is not None:
            timed.request_began()
        try:
            await asyncio.sleep(0)  # a hundred requests sent in one go let others come between
            answer = await handler(request)
        except web.HTTPException as error:
            answer = error_answer(_http_error(request, error, names))
        except Exception as error:
            cause = cause_of(error)
            if not isinstance(cause, SyshaxError):
                log.exception("%s %s failed", request.method, request.path)
                cause = InternalError(
                    f"{request.method} {request.path} failed inside the daemon", "the daemon's log has the details"
                )
            answer = error_answer(cause)
        finally:
            if timed is not None:
                timed.request_ended()
        answer.headers[BOOT_ID_HEADER] = boot_id
        return answer

    app = web.Application(middlewares=[same_form], client_max_size=_MAX_BODY)
    add_routes(app.router)
    return app


def _http_error(request: web.Request, error: web.HTTPException, names: Sequence[str]) -> SyshaxError:
    if isinstance(error, web.HTTPNotFound | web.HTTPMethodNotAllowed):
        paths = ", ".join(route for route in names if route.split()[1].split("/{")[0] in request.path)
        return NotFoundError(f"there is no {request.method} {request.path}", f"routes: {paths or ', '.join(names)}")
    return InvalidArgumentError(f"{request.method} {request.path}: {error.reason}")


class Site(web.BaseSite):
    """The listening socket, with our bounds on its connections."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, bounds: Connections) -> None:
        super().__init__(runner)
        self._listener, self._serve, self._bounds = listener, runner.server, bounds

    @property
    def name(self) -> str:
        return f"http://unix:{self._listener.getsockname()}:"

    async def start(self) -> None:
        await super().start()
        assert self._serve is not None
        factory = self._bounds.wrap(self._serve)
        self._server = await asyncio.get_running_loop().create_server(factory, sock=self._listener, backlog=BACKLOG)
