"""Bodies of requests: which model one names, how it begins, and the two fields that may be changed in it.

A body is bytes and stays bytes: `model` and `priority` are replaced where they stand, and every other byte is what the
client sent (duplicate members, escapes, spaces, numbers of any size). Only the outermost object is walked; what lies
within is skipped by regular expressions that cannot backtrack, so that a hostile body costs no more than its length.
Everything here takes JSON that a parser has accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, ValidationError

from syshaxd.frontend.errors import ApiError, Kind

JSON_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Their bodies are JSON whatever the content type says."""
_MOST_STEPS = 300_000
"""One for each bracket and string, four for each member: a fifth of a second."""
_HEAD_BYTES = 4096
"""Of a long beginning so much from either end tells it from others."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TO_MARK = re.compile(rb'[^"\[\]{}]*+')
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


@dataclass(eq=False, slots=True)
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
            return _replaced_in_json(self.raw, model, priority, self.model is not None)
        except _TooLongError:
            raise ApiError(
                Kind.BAD_REQUEST,
                "With an alias as its model, or with this key, whose priority is put into it, a request's body must "
                f"not be nested so much: it has more than {_MOST_STEPS} brackets and strings.",
            ) from None

    def forget(self) -> None:
        """Gives the memory back: it will not be sent again."""
        self.raw = b""

    def beginning(self, path: str, prompt_bytes: int) -> bytes:
        """What requests of one conversation have in common; empty where the route has no such thing.

        Of messages about all up to the first one of the user, of a prompt about its first `prompt_bytes` bytes: some
        piece of the body that a longer conversation begins with too, found by a few searches, not by reading JSON.
        """
        raw = self.raw
        if self.form is not Form.JSON:
            return b""
        if path == "/v1/chat/completions":
            return _messages(raw, b'"messages"')
        if path == "/v1/completions":
            return _text(raw, b'"prompt"', prompt_bytes)
        if path == "/v1/messages":
            return _text(raw, b'"system"', _HEAD_BYTES) + _messages(raw, b'"messages"')
        if path == "/v1/responses":
            return _text(raw, b'"instructions"', _HEAD_BYTES) + (
                _messages(raw, b'"input"') or _text(raw, b'"input"', prompt_bytes)
            )
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
    """Read twice where the strict and fast parser refuses what Python's takes, as workers do: other encodings, half
    surrogates, deep nesting. That one takes ten seconds for the largest bodies full of brackets: they are refused.
    """
    try:
        return _Head.model_validate_json(raw).model
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
            return None
    if raw.count(b"[") + raw.count(b"{") > _MOST_STEPS:
        raise ApiError(
            Kind.BAD_JSON, "The request's body is not JSON in UTF-8 (or of another kind, but far too large)."
        )
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
        self._known = (-1, 0)
        at = self._past(_SPACE, 3 if raw.startswith(_BOM) else 0)
        self.brace = at if raw[at : at + 1] == b"{" else -1
        """Where the outermost object's brace is; -1: it is no object."""

    def value_at(self, name: int) -> int:
        """Where the value of the member begins whose name stands at `name`."""
        return self._past(_COLON, self._string_end(name))

    def _past(self, pattern: re.Pattern[bytes], at: int) -> int:
        self._steps -= 1
        if self._steps < 0:
            raise _TooLongError
        found = pattern.match(self.raw, at)
        assert found is not None, "a parser has accepted it"
        return found.end()

    def members(self, brace: int) -> Iterator[tuple[str, int]]:
        """(name, begin of its value) of each member of the object at `brace`, duplicates too."""
        at = self._past(_SPACE, brace + 1)
        while self.raw[at] != 0x7D:
            name_end = self._string_end(at)
            name = self.raw[at:name_end]
            value = self._past(_COLON, name_end)
            yield json.loads(name) if b"\\" in name else name[1:-1].decode("utf-8", "replace"), value
            at = self._past(_COMMA, self.end_of(value))

    def end_of(self, value: int) -> int:
        if value != self._known[0]:
            self._known = value, self._end_of(value)
        return self._known[1]

    def _end_of(self, value: int) -> int:
        first = self.raw[value]
        if first == 0x22:
            return self._string_end(value)
        if first not in b"{[":
            return self._past(_SCALAR, value)
        at, depth = value + 1, 1
        while depth:
            at = self._past(_TO_MARK, at)
            mark = self.raw[at]
            if mark == 0x22:
                at = self._string_end(at)
            else:
                depth += 1 if mark in b"{[" else -1
                at += 1
        return at

    def _string_end(self, quote: int) -> int:
        """Most strings end at the next quote, which is found a hundred times faster than by an expression."""
        end = self.raw.find(b'"', quote + 1)
        return end + 1 if self.raw[end - 1] != 0x5C else self._past(_STRING, quote)


def _replaced_in_json(raw: bytes, model: str | None, priority: int | None, named: bool) -> bytes:
    """`named`: the object has a member `model`, whose name may be written with escapes."""
    values = {}
    if model is not None:
        values["model"] = json.dumps(model).encode()
    if priority is not None:
        values["priority"] = str(priority).encode()
    walk = _Walk(raw)
    if walk.brace < 0:
        return raw
    if (changed := _replaced_at_sight(walk, values, named)) is not None:
        return changed
    kept = walk.brace + 1
    pieces, seen, empty = [raw[:kept]], set(), True
    for name, begin in walk.members(walk.brace):
        empty = False
        if name in values:
            pieces += (raw[kept:begin], values[name])
            kept = walk.end_of(begin)
            seen.add(name)
    if priority is not None and "priority" not in seen:
        pieces.insert(1, _first_member(values["priority"], empty))
    return b"".join((*pieces, raw[kept:]))


def _first_member(priority: bytes, empty: bool) -> bytes:
    return b'"priority":' + priority + (b"" if empty else b",")


def _replaced_at_sight(walk: _Walk, values: Mapping[str, bytes], named: bool) -> bytes | None:
    """Without walking, where the names stand once, so that it is known where; None where they do not."""
    raw, after = walk.raw, walk.brace + 1
    models = raw.count(b'"model"') if "model" in values else 0
    if not named or models > 1 or b"\\u" in raw or ("priority" in values and b'"priority"' in raw):
        return None
    head, tail = raw[:after], raw[after:]
    if models:
        begin = walk.value_at(raw.index(b'"model"'))
        tail = raw[after:begin] + values["model"] + raw[walk.end_of(begin) :]
    return head + (_first_member(values["priority"], False) if "priority" in values else b"") + tail


def _messages(raw: bytes, name: bytes) -> bytes:
    """From the list's name to the end of the first message of the user, or to the first closing brace in that."""
    at = raw.find(name)
    user = raw.find(b'"user"', at)
    if at < 0 or user < 0:
        return b""
    end = raw.find(b"}", user) + 1 or len(raw)
    return raw[at:end] if end - at <= 2 * _HEAD_BYTES else raw[at : at + _HEAD_BYTES] + raw[end - _HEAD_BYTES : end]


def _text(raw: bytes, name: bytes, most: int) -> bytes:
    """A string's name and first bytes, to its end or to the first quotation mark in it."""
    at = raw.find(name)
    if at < 0:
        return b""
    begin = raw.find(b'"', at + len(name)) + 1
    return raw[at : min(begin + most, raw.find(b'"', begin) % len(raw))]


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
