"""syshax-api before real vLLM on the demo model: what vLLM answers passes unchanged, and the official client works.

One daemon, one worker and one front-end serve all tests. Raw requests are sent twice, to the worker and through the
front-end, and their answers compared byte for byte, times and made-up ids apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from front import FrontEnd, settled
from services import Daemon, WorkerServer, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = Path(os.environ.get("SYSHAX_DEMO_MODEL", ".demo/model")).resolve()
NAME = "demo"
WORDS = ["--served-model-name", NAME, "--syshax-model", NAME, "--syshax-format", "q8_0", "--enforce-eager"]
WORDS += [
    "--no-enable-prefix-caching",
    "--max-num-seqs",
    "8",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
]
ASKED: list[Any] = [{"role": "user", "content": "What is the capital of France? Réponds ☕."}]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
CITY = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "pick", "parameters": CITY}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": NAME, "messages": ASKED, "temperature": 0, "max_completion_tokens": 3} | fields


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETE, {"model": NAME, "prompt": "The capital of", "temperature": 0, "max_tokens": 3} | fields


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(),
    "usage in a stream": chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "logprobs": chat(logprobs=True, top_logprobs=3, return_token_ids=True),
    "logprobs in a stream": chat(logprobs=True, top_logprobs=2, return_token_ids=True, stream=True),
    "n": chat(n=2, temperature=0.9, seed=5),
    "json schema": chat(response_format=FORMAT, max_completion_tokens=10),
    "tool": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "pick"}}, max_completion_tokens=16
    ),
    "stop": chat(stop=["capital"], max_completion_tokens=6),
    "unknown fields": chat(x_unknown={"": [None, 1e-300]}, mirostat=2),
    "completion": complete(logprobs=2, echo=True),
    "completion stream": complete(stream=True, stream_options={"include_usage": True}),
    "prompts": complete(prompt=[[504, 3575, 282], [504, 1]], n=2, temperature=0.9, seed=3),
    "responses": ("/v1/responses", {"model": NAME, "input": "Say hello", "max_output_tokens": 2, "temperature": 0}),
    "embeddings": ("/v1/embeddings", {"model": NAME, "input": "hello"}),
    "tokenize": ("/tokenize", {"model": NAME, "messages": ASKED}),
    "tokenize text": ("/tokenize", {"model": NAME, "prompt": "größe ☕", "return_token_strs": True}),
    "detokenize": ("/detokenize", {"model": NAME, "tokens": [504, 3575, 282]}),
    "too long": complete(prompt="word " * 2000),
    "wrong field": chat(temperature=-1),
    "no choice": chat(n=0),
    "an image for a model that reads text": chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}]
    ),
    "no such route": ("/v1/no/such/route", {"model": NAME}),
}


@dataclass
class Stack:
    daemon: Daemon
    worker: WorkerServer
    front: FrontEnd

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.front.url}/v1", api_key="none", max_retries=0, timeout=120)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.front.url}/v1", api_key="none", max_retries=0, timeout=120)

    def passes(self) -> int:
        """Layer requests so far: they grow while, and only while, vLLM generates."""
        return self.daemon.model(NAME).forward_calls


@pytest.fixture(scope="module")
def stack(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    base = tmp_path_factory.mktemp("stack")
    worker = WorkerServer(base, MODEL, daemon.runtime_dir, *WORDS)
    front = FrontEnd(base, worker, daemon.runtime_dir)
    try:
        before = front.ready()
        assert before["http"] == 503 and "no worker is ready" in before["reason"], "vLLM needs longer than syshax-api"
        worker.wait()
        wait_until(lambda: front.ready()["http"] == 200, 5, "the front-end has noticed the worker by itself")
        yield Stack(daemon, worker, front)
        assert front.stop() == 0
        assert "Traceback" not in front.log.read_text()
    finally:
        if front.process.poll() is None:
            front.process.kill()
        if worker.process.poll() is None:
            worker.kill()


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_workers_own(stack: Stack, name: str) -> None:
    path, body = REQUESTS[name]
    headers = {"X-Request-Id": "0123456789abcdef-same"}
    direct = stack.front.ask("POST", path, body, headers, direct=True)
    through = stack.front.ask("POST", path, body, headers)
    assert through[:2] == direct[:2]
    assert settled(through[2]) == settled(direct[2])
    refused = name in ("embeddings", "too long", "wrong field", "no choice", "no such route") or "image" in name
    assert (through[0] >= 400) == refused, through


def test_limits_and_finish_reasons(stack: Stack) -> None:
    client = stack.client()
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = client.chat.completions.create(model=NAME, messages=ASKED, temperature=0, **limit)  # type: ignore[call-overload]
        assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"
    text = answer.choices[0].message.content
    short = client.chat.completions.create(
        model=NAME, messages=ASKED, temperature=0, stop=[text[-3:]], max_completion_tokens=4
    )
    assert short.choices[0].finish_reason == "stop" and short.choices[0].message.content == text[:-3]


def test_the_client_synchronous(stack: Stack) -> None:
    client = stack.client()
    assert [model.id for model in client.models.list()] == [NAME] == [client.models.retrieve(NAME).id]
    whole = client.chat.completions.create(model=NAME, messages=ASKED, temperature=0, max_completion_tokens=5)
    stream = client.chat.completions.create(
        model=NAME, messages=ASKED, temperature=0, max_completion_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    completion = client.completions.create(model=NAME, prompt="The capital of France is", max_tokens=2, temperature=0)
    assert completion.choices[0].text
    response = client.responses.create(model=NAME, input="Say hello", max_output_tokens=4, temperature=0)
    assert response.output_text


async def test_the_client_asynchronous(stack: Stack) -> None:
    """Streams at once, each complete and as when asked alone."""
    async with stack.async_client() as client:

        async def stream() -> str:
            made = await client.chat.completions.create(
                model=NAME, messages=ASKED, temperature=0, max_completion_tokens=6, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in made])

        texts = await asyncio.gather(*(stream() for _ in range(4)))
        assert len(set(texts)) == 1 and texts[0]
        async with client.responses.stream(model=NAME, input="Say hello", max_output_tokens=4) as events:
            kinds = [event.type async for event in events]
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def test_structured_output_tools_and_logprobs(stack: Stack) -> None:
    client = stack.client()
    made = client.chat.completions.create(
        model=NAME, messages=ASKED, temperature=0, max_completion_tokens=16, response_format=FORMAT
    )
    assert json.loads(made.choices[0].message.content or "")["n"] in (1, 2)
    called = client.chat.completions.create(
        model=NAME, messages=ASKED, temperature=0, max_completion_tokens=64, tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "pick"}},
    )  # fmt: skip
    calls = called.choices[0].message.tool_calls
    assert calls and calls[0].type == "function", called
    assert calls[0].function.name == "pick" and json.loads(calls[0].function.arguments)
    likely = client.chat.completions.create(
        model=NAME, messages=ASKED, temperature=0.9, seed=1, max_completion_tokens=2, logprobs=True, top_logprobs=3, n=2
    )
    for choice in likely.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in choice.logprobs.content)
    assert len(likely.choices) == 2


def test_a_workers_refusal_is_the_clients_exception(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        stack.client().completions.create(model=NAME, prompt="word " * 2000)
    with pytest.raises(openai.NotFoundError, match="Known models: `demo`"):
        stack.client().completions.create(model="none", prompt="x")


def stops_within(stack: Stack, leave: Callable[[], object]) -> float:
    """Seconds from leaving until vLLM computes no more; fails after three."""
    begin = time.monotonic()
    leave()
    last, still = stack.passes(), 0
    while still < 4:
        assert time.monotonic() - begin < 3, "vLLM goes on computing for nobody"
        time.sleep(0.05)
        now = stack.passes()
        still = still + 1 if now == last else 0
        last = now
    return time.monotonic() - begin - 4 * 0.05


def test_a_client_that_leaves_a_stream_stops_the_generation_within_a_second(stack: Stack) -> None:
    stream = stack.client().completions.create(
        model=NAME, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(iter(stream))
    assert stops_within(stack, stream.close) < 1


async def test_a_client_that_leaves_before_its_whole_answer_stops_the_generation_too(stack: Stack) -> None:
    before = stack.passes()
    async with stack.async_client() as client:
        ask = client.completions.create(model=NAME, prompt="Once", max_tokens=400, extra_body={"ignore_eos": True})
        task = asyncio.ensure_future(ask)
        async with asyncio.timeout(60):
            while stack.passes() < before + 200:  # noqa: ASYNC110 - another process's count
                await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0)
        assert await asyncio.to_thread(stops_within, stack, lambda: None) < 1


def test_a_restarted_daemon_is_found_by_a_worker_without_requests(stack: Stack) -> None:
    """Nobody asks the worker anything: a front-end sends nothing to one whose experts are away."""
    address = f"unix:{stack.worker.socket}"
    assert [session.address for session in stack.daemon.sessions().sessions] == [address]
    assert stack.front.ready()["http"] == 200
    stack.daemon.stop()
    wait_until(lambda: stack.front.ready()["http"] == 503, 5, "the front-end sees that the experts are away")
    assert "its experts are not attached" in stack.front.ready()["workers"][0]["reason"]
    stack.daemon.start()
    wait_until(lambda: stack.front.ready()["http"] == 200, 120, "the worker has had its model loaded and is ready")
    assert [session.address for session in stack.daemon.sessions().sessions] == [address]
    answer = stack.client().completions.create(model=NAME, prompt="The capital of France is", max_tokens=2)
    assert answer.choices[0].text


def test_a_killed_worker_ends_its_stream_with_an_error_event(stack: Stack) -> None:
    """The last one, since it spends the worker."""
    stream = stack.client().completions.create(
        model=NAME, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stack.worker.kill()
    with pytest.raises(openai.APIError, match="failed while it answered"):
        list(stream)
    wait_until(lambda: stack.front.ready()["http"] == 503, 2, "the front-end is not ready")
    with pytest.raises(openai.InternalServerError, match="no worker is ready"):
        stack.client().completions.create(model=NAME, prompt="x")
