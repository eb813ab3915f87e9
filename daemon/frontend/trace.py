"""W3C trace context: `traceparent` and `tracestate` pass as other headers do; here is what is made and what is logged.

Without tracing.make nothing happens here but for the log line of a request that carries one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, MutableMapping

NAMES = PARENT, STATE = "traceparent", "tracestate"
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


def trace_of(headers: Mapping[str, str]) -> str:
    """The trace id of a valid `traceparent`, else ""."""
    parent = headers.get(PARENT)
    found = _FORM.fullmatch(parent) if parent else None
    return found[1] if found else ""


def begin(headers: MutableMapping[str, str]) -> str:
    """Gives the headers a trace where they have none that is valid; its id. The standard has an invalid one replaced,
    and its state dropped."""
    if known := trace_of(headers):
        return known
    trace = secrets.token_hex(16)
    headers[PARENT] = f"00-{trace}-{secrets.token_hex(8)}-01"
    headers.pop(STATE, None)
    return trace
