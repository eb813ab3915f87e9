"""Tokens by usage and by events, whatever the chunks; trace context."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from front_fixtures import Front, Setup, streaming
from hypothesis import example, given
from hypothesis import strategies as st

from syshaxd.frontend import trace
from syshaxd.frontend.board import Board
from syshaxd.frontend.instruments import Counter
from syshaxd.frontend.tokens import Tokens, usage_of

USAGE = {"prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


def counted(chunks: Sequence[bytes], streamed: bool) -> tuple[int, int, list[int]]:
    """Prompt tokens, generated ones, and these after each chunk."""
    board = Board()
    prompt, generated = Counter(board, "p"), Counter(board, "g")
    tokens = Tokens(prompt, generated, streamed)
    on_the_way = []
    for chunk in chunks:
        tokens.passed(chunk)
        on_the_way.append(generated.value())
    tokens.end()
    assert on_the_way == sorted(on_the_way) and (not on_the_way or on_the_way[-1] <= generated.value())
    return prompt.value(), generated.value(), on_the_way


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chat(tokens: int, usage: dict[str, Any] | None) -> list[bytes]:
    """As vLLM streams it."""
    events = [event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})]
    events += [event({"choices": [{"delta": {"content": f"t{number}"}}]}) for number in range(tokens)]
    return [*events, *([event({"choices": [], "usage": usage})] if usage else []), event(b"[DONE]")]


@given(st.integers(0, 40), st.booleans(), st.data())
def test_a_streams_tokens_however_it_is_cut(tokens: int, told: bool, data: st.DataObject) -> None:
    whole = b"".join(chat(tokens, {**USAGE, "completion_tokens": tokens} if told else None))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    _, generated, _ = counted(pieces, True)
    assert tokens <= generated <= tokens + 2, "usage that is cut twice is not found; the events show as much"


@given(st.integers(0, 40), st.booleans())
def test_a_chunk_for_each_event_counts_as_it_goes(tokens: int, told: bool) -> None:
    chunks = chat(tokens, {**USAGE, "completion_tokens": tokens} if told else None)
    prompt, generated, on_the_way = counted(chunks, True)
    assert (prompt, generated) == (7 if told else 0, tokens)
    assert on_the_way[-1] >= tokens - 15, "a long stream is seen while it lasts"


def test_usage_adds_what_events_did_not_show() -> None:
    assert counted(chat(10, {**USAGE, "completion_tokens": 35}), True)[:2] == (7, 35)


def test_events_with_names_have_three_lines() -> None:
    chunks = [b"event: response.output_text.delta\n" + event({"delta": "x"})] * 41
    assert counted(chunks, True)[1] == 40


def test_a_stream_that_breaks_off_counts_what_came() -> None:
    assert counted(chat(10, None)[:6], True)[1] == 5


texts = st.text(max_size=30) | st.sampled_from(['"usage":{"prompt_tokens":99,"completion_tokens":99}', "usage", '\\"'])


@given(texts, st.integers(0, 10**9), st.integers(0, 10**9), st.booleans(), st.integers(1, 500))
@example('"usage": {"prompt_tokens": 1}', 2, 3, True, 10)
def test_a_json_answers_usage_and_never_the_models_own_words(
    text: str, prompt: int, generated: int, compact: bool, size: int
) -> None:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
    separators = (",", ":") if compact else None
    value = {"choices": [{"message": {"content": text}}], "usage": usage, "kv_transfer_params": None}
    body = json.dumps(value, separators=separators, ensure_ascii=False).encode("utf-8", "surrogatepass")
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    if size >= 160:
        assert counted(chunks, False)[:2] == (prompt, generated)
    assert usage_of(body) == (prompt, generated)
    del value["usage"]
    assert usage_of(json.dumps(value).encode()) == (0, None)


def test_names_of_other_routes() -> None:
    assert usage_of(b'{"usage":{"input_tokens":4,"output_tokens":6,"total_tokens":10}}') == (4, 6)
    assert usage_of(b'{"data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}') == (4, 0)
    assert usage_of(b'{"usage":null}') == (0, None)
    assert usage_of(b'{"usage":{"prompt_tokens":' + b"9" * 5000 + b"}}")[1] in (0, None)


async def tokens_of(front: Front, url: str) -> tuple[float, float]:
    labels = {"model_name": "m", "worker": url, "priority": "normal"}
    return front.metric("vllm:prompt_tokens_total", **labels), front.metric("vllm:generation_tokens_total", **labels)


async def test_through_the_front_end(setup: Setup) -> None:
    worker = await setup.worker()
    front = await setup.front(worker)
    worker.answer = streaming(*chat(5, USAGE), pause=0.01)
    await (await front.chat(stream=True)).read()
    assert await tokens_of(front, worker.url) == (7, 5)

    async def whole(request: web.Request) -> web.Response:
        return web.json_response({"choices": [], "usage": USAGE})

    async def refused(request: web.Request) -> web.Response:
        return web.json_response({"error": {}, "usage": USAGE}, status=400)

    worker.answer = whole
    await (await front.chat()).read()
    worker.answer = refused
    await (await front.chat()).read()
    assert await tokens_of(front, worker.url) == (14, 10)


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("parent", "trace_id"),
    [
        (PARENT, PARENT[3:35]),
        (f"01{PARENT[2:]}-later", PARENT[3:35]),
        ("", ""),
        (f"ff{PARENT[2:]}", ""),
        (PARENT.upper(), ""),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01", ""),
        (f" {PARENT}", ""),
    ],
)
def test_which_traces_are_valid(parent: str, trace_id: str) -> None:
    assert trace.trace_of({"traceparent": parent}) == trace_id


async def test_a_trace_passes_and_is_logged(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syshax.api")
    worker = await setup.worker()
    front = await setup.front(worker)
    body, own = {"model": "m"}, {"traceparent": PARENT, "tracestate": "a=1,b=2"}
    await (await front.session.post("/v1/chat/completions", json=body, headers=own)).read()
    await (await front.session.post("/v1/chat/completions", json=body)).read()
    first, second = (dict(seen.headers) for seen in worker.seen)
    assert {name: first[name] for name in own} == own
    assert not {"traceparent", "tracestate"} & {name.lower() for name in second}
    logged = [getattr(record, "trace", None) for record in caplog.records if record.message == "request"]
    assert logged == [PARENT[3:35], None]


async def test_a_trace_is_made_where_asked_for(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syshax.api")
    worker = await setup.worker()
    front = await setup.front(worker, tracing={"make": True})
    for headers in ({}, {"traceparent": PARENT}, {"traceparent": "nonsense", "tracestate": "a=1"}):
        await (await front.session.post("/v1/chat/completions", json={"model": "m"}, headers=headers)).read()
    made, kept, replaced = ({name.lower(): value for name, value in seen.headers} for seen in worker.seen)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", made["traceparent"])
    assert kept["traceparent"] == PARENT
    assert trace.trace_of(replaced) and "tracestate" not in replaced
    logged = [getattr(record, "trace", None) for record in caplog.records if record.message == "request"]
    assert logged == [trace.trace_of(headers) for headers in (made, kept, replaced)]
