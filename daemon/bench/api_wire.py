"""What the API benchmark's client and fake worker say to each other, as prepared bytes.

Bytes that are counted stand once in each event, so that a count does not depend on where a read cuts.
"""

from __future__ import annotations

import json

MODEL = "bench"
EVENT_MARK = b"~"
"""Once in every streamed event."""
BLOCK_EVENTS = 16
"""Events that leave together in a stream at full speed."""
_CLIENT_HEADERS = (
    "Accept: application/json",
    "Accept-Encoding: gzip, deflate",
    "Authorization: Bearer sk-bench-0123456789abcdef",
    "Content-Type: application/json",
    "User-Agent: OpenAI/Python 2.0.0",
    "X-Stainless-Arch: x64",
    "X-Stainless-Async: false",
    "X-Stainless-Lang: python",
    "X-Stainless-OS: Linux",
    "X-Stainless-Retry-Count: 0",
    "X-Stainless-Runtime: CPython",
    "X-Stainless-Runtime-Version: 3.11.2",
)
"""What the official client sends."""


def request(**fields: object) -> bytes:
    """A chat request with these fields in its body, in one piece."""
    question = "Why is the sky blue, and why is it red in the evening? Answer in two sentences."
    messages = [{"role": "system", "content": "You answer shortly."}, {"role": "user", "content": question}]
    body = json.dumps({"model": MODEL, "messages": messages, "temperature": 0.7, **fields}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1:8000", *_CLIENT_HEADERS]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def answer(body: bytes, kind: str = "application/json", status: str = "200 OK") -> bytes:
    """A whole answer of known length."""
    head = f"HTTP/1.1 {status}\r\nServer: uvicorn\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    fields = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


EVENT = chunk(_event(" word~"))
BLOCK = EVENT * BLOCK_EVENTS
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_MESSAGE = {"role": "assistant", "content": "Because air scatters blue light most. " * 4}
_COMPLETION = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 30, "total_tokens": 70, "completion_tokens": 40},
}
COMPLETION = answer(json.dumps(_COMPLETION).encode())
MODELS = answer(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
EMPTY = answer(b"")


def whole_message(data: bytes) -> int:
    """Bytes of the HTTP message with a Content-Length at the start of `data`; 0 while it is incomplete."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return 0
    at = data.lower().find(b"\r\ncontent-length:", 0, end)
    length = int(data[at + 17 : data.find(b"\r", at + 17)]) if at >= 0 else 0
    total = end + 4 + length
    return total if len(data) >= total else 0
