"""What must be taken from a client's request to pass it on: its body whole, its path, its headers end to end.

Nothing here looks into the body; `bodies` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict, CIMultiDictProxy

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
_OURS_TO_SET = frozenset(("host", "content-length", "expect"))
OUTSIDE_V1 = frozenset(f"/{name}" for name in ("tokenize", "detokenize", "pooling", "classify", "score", "rerank"))
"""What vLLM offers to clients beside /v1/."""


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """The whole body as sent (still encoded, if it is). `ApiError` 413 over `limit` bytes, 400 when it breaks off."""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if (coding := request.headers.get("Transfer-Encoding", "chunked")).lower() != "chunked":
        raise ApiError(Kind.BAD_REQUEST, f"The transfer coding {quoted(coding)} is not taken, only chunked.")
    if not request.can_read_body:
        return b""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    chunks: list[bytes] = []
    size = 0
    try:
        while chunk := await request.content.readany():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
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


def _kept(headers: CIMultiDictProxy[str], dropped: Iterable[str]) -> CIMultiDict[str]:
    named = (word.strip().lower() for line in headers.getall("Connection", ()) for word in line.split(","))
    out = HOP_BY_HOP.union(dropped, named)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in out)


def headers_to_worker(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """End-to-end headers in the client's order; the HTTP client adds Host and Content-Length."""
    kept = _kept(headers, _OURS_TO_SET)
    for name, value in kept.items():
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise ApiError(Kind.BAD_REQUEST, f"The header {name} is not UTF-8.")
    return kept


def headers_to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The worker's end-to-end headers, Content-Length among them."""
    return _kept(headers, ())
