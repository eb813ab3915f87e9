"""Bodies of requests: which model one names, how it begins, and the two fields that may be changed in it.

A body is bytes and stays bytes: `model` and `priority` are replaced where they stand, and every other byte is what the
client sent (duplicate members, escapes, spaces, numbers of any size). Only the outermost object is walked; what lies
within is skipped by regular expressions that cannot backtrack, so that a hostile body costs no more than its length.
Everything here takes JSON that a parser has accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, ValidationError

from syshaxd.frontend.errors import ApiError, Kind

JSON_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Their bodies are JSON whatever the content type says."""
_CONVERSATION = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/v1/messages": ("system", "messages"),
    "/v1/responses": ("instructions", "input"),
}
"""Routes whose workers keep caches by prefix, and the members of their bodies where the prefix is."""
_MOST_STEPS = 200_000
"""Brackets outside strings, and four for each member: a tenth of a second."""
_HEAD_BYTES = 16384
"""Of a long beginning so much from either end tells it from others."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TO_BRACKET = re.compile(rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+[\[\]{}]', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\n\r,\]}]*+")
_SPACE = re.compile(rb"[ \t\n\r]*+")
_COLON = re.compile(rb"[ \t\n\r]*+:[ \t\n\r]*+")
_COMMA = re.compile(rb"[ \t\n\r]*+,?[ \t\n\r]*+")
_BOUNDARY = re.compile(r'(?i);\s*boundary=(?:"([^"\r\n]+)"|([^\s;",]+))')
_DISPOSITION = re.compile(rb"(?im)^content-disposition:([^\r\n]*)")
_PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*(?:"([^"]*)"|[^\s;"]*)')
_PART_HEAD_BYTES = 4096
_BOM = b"\xef\xbb\xbf"


class Form(Enum):
    """What a body is, as far as it can be looked into."""

    JSON = "JSON"
    MULTIPART = "a multipart form"
    COMPRESSED = "compressed"
    OPAQUE = "of a type that is not looked into"


@dataclass(frozen=True, slots=True)
class Body:
    """One request's body and the model that it names (None where it names none)."""

    raw: bytes
    form: Form
    model: str | None
    content_type: str

    def changed(self, model: str | None, priority: int | None) -> bytes:
        """The bytes to send: with another model, with this priority (None: as it is).

        `ApiError` 400 where that cannot be done: a body that is not UTF-8, or whose priority cannot be seen.
        """
        if model is None and priority is None:
            return self.raw
        if self.form is Form.MULTIPART:
            return self.raw if model is None else _replaced_in_form(self.raw, self.content_type, model)
        if self.form is Form.OPAQUE or not self.raw:
            return self.raw
        if self.form is Form.COMPRESSED or not _is_utf8(self.raw):
            raise ApiError(
                Kind.BAD_REQUEST,
                "With an alias as its model, or with this key, whose priority is put into it, a request's body must be "
                "JSON in UTF-8 that is not compressed.",
            )
        try:
            return _replaced_in_json(self.raw, model, priority)
        except _TooLongError:
            raise ApiError(
                Kind.BAD_REQUEST,
                "With an alias as its model, or with this key, whose priority is put into it, a request's body must "
                f"not be nested so much: it has more than {_MOST_STEPS} brackets or members.",
            ) from None

    def beginning(self, path: str, prompt_bytes: int) -> bytes:
        """What requests of one conversation have in common; empty where the route has no such thing.

        Of messages all up to the first one of the user, of a prompt its first `prompt_bytes` bytes.
        """
        wanted = _CONVERSATION.get(path)
        if wanted is None or self.form is not Form.JSON or not _is_utf8(self.raw):
            return b""
        try:
            return _beginning(self.raw, wanted, prompt_bytes)
        except _TooLongError:
            return b""


class _Head(BaseModel):
    model: Any = None


def read(path: str, headers: Mapping[str, str], raw: bytes) -> Body:
    """What can be known of a body. `ApiError` 400 for malformed JSON."""
    content_type = headers.get("Content-Type", "")
    kind = content_type.lower()
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        return Body(raw, Form.COMPRESSED, None, content_type)
    if path in JSON_PATHS or ("json" in kind and raw):
        model = _json_model(raw)
        return Body(raw, Form.JSON, model if isinstance(model, str) else None, content_type)
    if kind.startswith("multipart/form-data"):
        return Body(raw, Form.MULTIPART, _form_model(raw, content_type), content_type)
    return Body(raw, Form.OPAQUE, None, content_type)


def _json_model(raw: bytes) -> Any:
    try:
        return _Head.model_validate_json(raw).model
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
            return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ApiError(Kind.BAD_JSON, f"The request's body is not valid JSON: {reason}.") from None
    return value.get("model") if isinstance(value, dict) else None


def _is_utf8(raw: bytes) -> bool:
    return b"\0" not in raw[:4] and not raw.startswith((b"\xff\xfe", b"\xfe\xff"))


class _TooLongError(Exception):
    """A body that would take seconds to walk."""


class _Walk:
    """Over a JSON text that a parser has accepted: where members and items begin and end."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._steps = _MOST_STEPS
        at = self._past(_SPACE, 3 if raw.startswith(_BOM) else 0)
        self.brace = at if raw[at : at + 1] == b"{" else -1
        """Where the outermost object's brace is; -1: it is no object."""

    def _past(self, pattern: re.Pattern[bytes], at: int) -> int:
        self._steps -= 1
        if self._steps < 0:
            raise _TooLongError
        found = pattern.match(self.raw, at)
        assert found is not None, "a parser has accepted it"
        return found.end()

    def members(self, brace: int) -> Iterator[tuple[str, int, int]]:
        """(name, begin of its value, end of it) of each member of the object at `brace`, duplicates too."""
        at = self._past(_SPACE, brace + 1)
        while self.raw[at] != 0x7D:
            name_end = self._past(_STRING, at)
            name = self.raw[at:name_end]
            value = self._past(_COLON, name_end)
            end = self._value_end(value)
            yield json.loads(name) if b"\\" in name else name[1:-1].decode("utf-8", "replace"), value, end
            at = self._past(_COMMA, end)

    def items(self, bracket: int) -> Iterator[tuple[int, int]]:
        """(begin, end) of each item of the array at `bracket`."""
        at = self._past(_SPACE, bracket + 1)
        while self.raw[at] != 0x5D:
            end = self._value_end(at)
            yield at, end
            at = self._past(_COMMA, end)

    def _value_end(self, at: int) -> int:
        first = self.raw[at]
        if first == 0x22:
            return self._past(_STRING, at)
        if first not in b"{[":
            return self._past(_SCALAR, at)
        at, depth = at + 1, 1
        while depth:
            at = self._past(_TO_BRACKET, at)
            depth += 1 if self.raw[at - 1] in b"{[" else -1
        return at


def _replaced_in_json(raw: bytes, model: str | None, priority: int | None) -> bytes:
    walk = _Walk(raw)
    if walk.brace < 0:
        return raw
    values = {}
    if model is not None:
        values["model"] = json.dumps(model).encode()
    if priority is not None:
        values["priority"] = str(priority).encode()
    kept = walk.brace + 1
    pieces, seen, empty = [raw[:kept]], set(), True
    for name, begin, end in walk.members(walk.brace):
        empty = False
        if name in values:
            pieces += (raw[kept:begin], values[name])
            kept = end
            seen.add(name)
    if priority is not None and "priority" not in seen:
        pieces.insert(1, b'"priority":' + values["priority"] + (b"" if empty else b","))
    return b"".join((*pieces, raw[kept:]))


def _beginning(raw: bytes, wanted: Collection[str], prompt_bytes: int) -> bytes:
    walk = _Walk(raw)
    found: list[bytes] = []
    for name, value, end in walk.members(walk.brace) if walk.brace >= 0 else ():
        if name in wanted:
            found.append(_leading(walk, value, end, prompt_bytes))
            if len(found) == len(wanted):
                break
    return b"".join(found)


def _leading(walk: _Walk, value: int, end: int, prompt_bytes: int) -> bytes:
    """How a prompt (its first bytes) or a list of messages (to the first one of the user) begins."""
    raw = walk.raw
    if raw[value] != 0x5B:
        return raw[value : min(end, value + prompt_bytes)]
    last = value + 1
    for begin, last in walk.items(value):  # noqa: B007 - the last one counts
        if raw[begin] != 0x7B:
            return raw[value : min(end, value + prompt_bytes)]
        if next((raw[at:to] for name, at, to in walk.members(begin) if name == "role"), b"") == b'"user"':
            break
    if last - value <= 2 * _HEAD_BYTES:
        return raw[value:last]
    return raw[value : value + _HEAD_BYTES] + raw[last - _HEAD_BYTES : last]


def _parts(raw: bytes, content_type: str) -> Iterator[tuple[bytes | None, int, int]]:
    """(name, begin, end of the content) of each part of a form; name None: not plain, others may read it otherwise."""
    found = _BOUNDARY.search(content_type)
    delimiter = b"--" + (found[1] or found[2]).encode("utf-8", "surrogateescape") if found else b""
    at = 0
    while found and raw.startswith(delimiter, at):
        head = at + len(delimiter)
        if raw.startswith(b"--", head):
            return
        begin = raw.find(b"\r\n\r\n", head, head + _PART_HEAD_BYTES) + 4
        end = raw.find(b"\r\n" + delimiter, max(begin - 2, head))
        if not raw.startswith(b"\r\n", head) or begin < 4 or end < begin:
            break
        yield _part_name(raw[head:begin]), begin, end
        at = end + 2
    yield None, 0, 0


def _part_name(headers: bytes) -> bytes | None:
    lines = _DISPOSITION.findall(headers)
    if len(lines) != 1 or b"\\" in lines[0] or b"\r\n " in headers or b"\r\n\t" in headers:
        return None
    named = [value for name, value in _PARAMETER.findall(lines[0]) if name.lower().rstrip(b"*0123456789") == b"name"]
    return named[0] or None if len(named) == 1 else None


def _form_model(raw: bytes, content_type: str) -> str | None:
    """None also where two parts disagree, or a part's name is written so that a worker might read it otherwise."""
    models = set()
    for name, begin, end in _parts(raw, content_type):
        if name is None:
            return None
        if name == b"model":
            models.add(raw[begin:end])
    return models.pop().decode("utf-8", "replace") if len(models) == 1 else None


def _replaced_in_form(raw: bytes, content_type: str, model: str) -> bytes:
    pieces: list[bytes] = []
    kept = 0
    for name, begin, end in _parts(raw, content_type):
        if name == b"model":
            pieces += (raw[kept:begin], model.encode())
            kept = end
    return b"".join((*pieces, raw[kept:]))
