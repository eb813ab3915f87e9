"""What must be taken from a client's request to pass it on: its body whole, its path, its headers end to end.

Nothing here looks into the body; `bodies` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.web_protocol import RequestPayloadError

from syshaxd.frontend.errors import ApiError, Kind, quoted

HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_TO_WORKER = frozenset(name.encode() for name in (*HOP_BY_HOP, "host", "content-length", "expect"))
OUTSIDE_V1 = frozenset(f"/{name}" for name in ("tokenize", "detokenize", "pooling", "classify", "score", "rerank"))
"""What vLLM offers to clients beside /v1/."""
_COUNT_BYTES = 1 << 16
"""A body whose length is not announced is counted each time it has grown by so much."""


async def read_body(request: web.BaseRequest, limit: int, count: Callable[[int], None]) -> bytes:
    """The whole body as sent (still encoded, if it is). `ApiError` 413 over `limit` bytes, 400 when it breaks off.

    `count` hears how much memory it takes before that is so, as far as its length is announced, else as it grows; what
    it raises ends the reading.
    """
    counted = request.content_length or 0
    if counted > limit:
        raise _too_large(limit)
    count(counted)
    if (coding := request.headers.get("Transfer-Encoding", "chunked")).lower() != "chunked":
        raise ApiError(Kind.BAD_REQUEST, f"The transfer coding {quoted(coding)} is not taken, only chunked.")
    content = request.content
    expects = request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11
    if expects and not content.at_eof():
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    chunks: list[bytes] = []
    size = 0
    try:
        while not content.at_eof() and (chunk := await content.readany()):
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            if size >= counted + _COUNT_BYTES:
                count(size)
                counted = size
            chunks.append(chunk)
        if (broken := content.exception()) is not None:  # `connections` ends a malformed body so
            raise broken
    except RequestPayloadError as error:
        raise ApiError(Kind.BAD_REQUEST, f"The request's body is broken: {error}") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(Kind.TOO_LARGE, f"The request's body is larger than the limit of {limit} bytes (limits.body).")


def path_of(request: web.BaseRequest) -> tuple[str, str]:
    """The target's path, and the path with its query, both as the client wrote them."""
    target = request.raw_path
    if not target.startswith("/"):
        target = request.rel_url.raw_path_qs
    return target.partition("?")[0].partition("#")[0], target


def is_plain(path: str) -> bool:
    """No segment that some server could read as "up": these would leave /v1/ behind our back."""
    return not any(part in (".", "..") for part in re.split(r"[/\\]", unquote(unquote(path))))


def headers_to_worker(request: web.BaseRequest, *added: tuple[str, str], without: Iterable[str] = ()) -> bytes:
    """Lines of the end-to-end headers, byte for byte in the client's order, then of those `added`; the HTTP client sets
    Host and Content-Length. `ApiError` 400 for one that is not UTF-8."""
    dropped = _NOT_TO_WORKER
    if without or "Connection" in request.headers:
        named = ",".join(request.headers.getall("Connection", ())).lower().split(",")
        dropped = dropped.union(name.strip().encode() for name in (*named, *without))
    lines = [b"%b: %b\r\n" % line for line in request.raw_headers if line[0].lower() not in dropped]
    lines += [f"{name}: {value}\r\n".encode() for name, value in added]
    head = b"".join(lines)
    if not head.isascii():
        try:
            head.decode()
        except UnicodeDecodeError:
            raise ApiError(Kind.BAD_REQUEST, "A header is not UTF-8.") from None
    return head
