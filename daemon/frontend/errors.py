"""What the front-end itself answers when it cannot pass a request on: OpenAI error objects, one table of kinds.

Errors of a worker are not touched; they pass through. Texts never name a worker's address: that is for the log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from aiohttp import web

SERVER = "syshax-api"
"""The Server header of answers that no worker gave."""


class Kind(Enum):
    """HTTP status, OpenAI `type` and `code` of each error."""

    BAD_REQUEST = (400, "invalid_request_error", "bad_request")
    BAD_JSON = (400, "invalid_request_error", "invalid_json")
    MODEL_MISSING = (400, "invalid_request_error", "missing_required_parameter")
    NO_KEY = (401, "invalid_request_error", "invalid_api_key")
    FORBIDDEN = (403, "invalid_request_error", "insufficient_permissions")
    NO_ROUTE = (404, "invalid_request_error", "unknown_url")
    NO_MODEL = (404, "invalid_request_error", "model_not_found")
    METHOD = (405, "invalid_request_error", "method_not_allowed")
    SLOW_BODY = (408, "invalid_request_error", "request_timeout")
    SLOW_CLIENT = (408, "invalid_request_error", "client_too_slow")
    TOO_LARGE = (413, "invalid_request_error", "request_too_large")
    RATE = (429, "rate_limit_error", "rate_limit_exceeded")
    OVERLOADED = (429, "rate_limit_error", "overloaded")
    INTERNAL = (500, "server_error", "internal_error")
    WORKER_FAILED = (502, "server_error", "worker_failed")
    NOT_READY = (503, "server_error", "not_ready")
    SHUTTING_DOWN = (503, "server_error", "shutting_down")
    TIMEOUT = (504, "server_error", "worker_timeout")

    @property
    def status(self) -> int:
        return self.value[0]


@dataclass
class ApiError(Exception):
    """Raised anywhere before the first byte of an answer; becomes the whole answer."""

    kind: Kind
    message: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> bytes:
        """The JSON of the error object."""
        _, type_, code = self.kind.value
        fields = {"message": self.message, "type": type_, "param": self.param, "code": code}
        return json.dumps({"error": fields}, ensure_ascii=False).encode()

    def event(self) -> bytes:
        """The same as a server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def response(self) -> web.Response:
        response = web.Response(status=self.kind.status, body=self.body(), content_type="application/json")
        response.headers["Server"] = SERVER
        for name, value in self.headers:
            response.headers[name] = value
        return response


def internal() -> ApiError:
    """For what should not happen; whoever makes it has logged what did."""
    return ApiError(Kind.INTERNAL, "An internal error of syshax-api; its log has the details.")


def quoted(text: str, limit: int = 128) -> str:
    """A client's text for logs and messages: one line, printable, not longer than `limit`."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return short if short.isprintable() and " " not in short else ascii(short)
