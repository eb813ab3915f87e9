"""The OpenAPI description that /openapi.json serves, made from the table of routes and the tables below.

It describes what the front-end itself answers; of what passes to a worker it says only that it passes, and which errors
are ours. A route without a row here is described by its handler's docstring alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from syshaxd.frontend.errors import Kind

Schema = dict[str, Any]
Routes = Mapping[str, Mapping[str, Callable[..., Any]]]
_TEXT: Schema = {"type": "string"}
_MODEL: Schema = {
    "type": "object",
    "properties": {"id": _TEXT, "object": {"const": "model"}},
    "required": ["id", "object"],
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": _TEXT,
                "type": {"enum": sorted({kind.value[1] for kind in Kind})},
                "param": {"type": ["string", "null"]},
                "code": {"enum": sorted({kind.value[2] for kind in Kind})},
            },
        }
    },
}
_READY: Schema = {
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {"enum": ["ready", "not ready"]},
        "reason": _TEXT,
        "models": {"type": "array", "items": _TEXT},
        "workers": {"type": "array", "items": {"type": "object", "required": ["worker", "ready", "reason"]}},
    },
}
_OWN: dict[str, dict[int, Schema]] = {
    "/health": {200: {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}}},
    "/ready": {200: _READY, 503: {"allOf": [_READY, _ERROR]}},
    "/metrics": {200: _TEXT},
    "/openapi.json": {200: {"type": "object", "required": ["openapi", "info", "paths"]}},
    "/v1/models": {
        200: {
            "type": "object",
            "required": ["object", "data"],
            "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
        },
        503: _ERROR,
    },
    "/v1/models/{model}": {200: _MODEL, 404: _ERROR, 503: _ERROR},
}
"""Path -> status -> the answer, beside the errors that every route may give."""
_KINDS = {"/metrics": "text/plain"}
_PASSED_ON = sorted({kind.status for kind in Kind} - {401, 405, 500})
"""What the front-end may answer in the place of a worker."""


def _answer(description: str, schema: Schema, kind: str = "application/json") -> Schema:
    return {"description": description, "content": {kind: {"schema": schema}}}


def _operation(path: str, handler: Callable[..., Any], forwarded: bool, is_open: bool) -> Schema:
    answers: dict[str, Schema] = {}
    if forwarded:
        answers = {str(status): _answer("From syshax-api, or from the worker.", {}) for status in _PASSED_ON}
        answers |= {"2XX": {"description": "The worker's answer, byte for byte."}}
    elif path in _OWN:
        answers = {
            str(status): _answer("", schema, _KINDS.get(path, "application/json"))
            for status, schema in _OWN[path].items()
        }
    else:
        answers = {"default": {"description": "See docs/API.md."}}
    error = {"$ref": "#/components/schemas/Error"}
    answers.setdefault("400", _answer("Malformed HTTP.", error))
    made: Schema = {"summary": " ".join((handler.__doc__ or "Passed to a worker.").split()), "responses": answers}
    if not is_open:
        made["security"] = [{"key": []}]
        answers["401"] = _answer("No valid key.", error)
    if forwarded:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": {}}}}
    if "{model}" in path:
        made["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}]
    return made


def describe(routes: Routes, open_paths: frozenset[str], forward: Callable[..., Any]) -> Schema:
    """An OpenAPI 3.1 document of these routes; `forward` is the handler that passes to a worker."""
    paths = {
        path: {
            method.lower(): _operation(path, handler, handler is forward, path in open_paths)
            for method, handler in methods.items()
        }
        for path, methods in routes.items()
    }
    try:
        release = version("syshax")
    except PackageNotFoundError:
        release = "0"
    return {
        "openapi": "3.1.0",
        "info": {"title": "syshax-api", "version": release, "description": "The OpenAI API in front of vLLM workers."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
