"""Workers that answer oddly: what is an answer passes, what is none becomes an error, and no answer is another's.

The worker is bytes on a socket. After each odd answer the same front-end asks again, many times: a byte too many that
stayed in a kept connection would be the next client's answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from front_fixtures import Setup, until

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
POISON = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"


def sized(body: bytes, *lines: bytes, status: bytes = OK) -> bytes:
    return status + JSON + b"".join(lines) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunks(*parts: bytes, end: bytes = b"0\r\n\r\n", kind: bytes = JSON) -> bytes:
    return OK + kind + CHUNKED + b"\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


PASSES = {
    "with a length": (sized(b"{}"), b"{}"),
    "in chunks": (chunks(b"{", b"}"), b"{}"),
    "chunks with an extension": (OK + JSON + CHUNKED + b"\r\n2;a=b\r\n{}\r\n0\r\n\r\n", b"{}"),
    "trailers": (chunks(b"{}", end=b"0\r\nX-Late: 1\r\nX-Syshax-Worker: y\r\n\r\n"), b"{}"),
    "nothing in it": (sized(b""), b""),
    "100 first": (b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"{}"), b"{}"),
    "103 first": (b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" + sized(b"{}"), b"{}"),
    "no reason": (sized(b"{}", status=b"HTTP/1.1 200\r\n"), b"{}"),
    "an unknown status": (sized(b"{}", status=b"HTTP/1.1 299 Odd\r\n"), b"{}"),
    "close": (sized(b"{}", b"Connection: close\r\n"), b"{}"),
    "more than its length": (sized(b"{}") + POISON, b"{}"),
    "more than its chunks": (chunks(b"{}") + POISON, b"{}"),
    "text where nothing may be": (b"HTTP/1.1 204 No Content\r\n\r\n" + b"x" * 20, b""),
    "long": (sized(b"x" * 300_000), b"x" * 300_000),
    "many headers": (sized(b"{}", *[b"X-%d: %b\r\n" % (n, b"y" * 500) for n in range(60)]), b"{}"),
}
TO_THE_END = {
    "until it closes": (OK + JSON + b"\r\n{}", b"{}"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n" + JSON + b"\r\n{}", b"{}"),
}
"""The worker closes after these."""
NO_ANSWER = {
    "lengths that differ": OK + b"Content-Length: 2\r\nContent-Length: 7\r\n\r\n{}",
    "a length and chunks": OK + CHUNKED + b"Content-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a negative length": OK + b"Content-Length: -2\r\n\r\n{}",
    "not HTTP": b"SSH-2.0-OpenSSH\r\n",
    "HTTP/2": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nxxx",
    "a head that is cut": OK + JSON[:9],
    "a head without end": OK + b"".join(b"X-%d: %b\r\n" % (n, b"y" * 1000) for n in range(3000)),
    "a line without end": OK + b"X: " + b"y" * 3_000_000,
    "a control in a header": OK + b"X: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk that is no number": OK + CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
    "nothing": b"",
}
"""The worker closes after these too."""
BROKEN = {
    "shorter than its length": OK + JSON + b"Content-Length: 100\r\n\r\n{}",
    "a chunk that is cut": OK + JSON + CHUNKED + b"\r\n64\r\n{}",
    "chunks without the last": chunks(b"{}", end=b""),
    "a broken chunk after a good one": chunks(b"{}", end=b"zz\r\n{}\r\n"),
}
"""They begin as answers: cut or, before anything was passed on, tried again and given up."""


@asynccontextmanager
async def odd_worker() -> AsyncIterator[tuple[str, list[str]]]:
    """Its address, and the cases that it was asked for. A body `{"model": "m", "case": …}` asks for a case."""
    answers = {**{name: a for name, (a, _) in (PASSES | TO_THE_END).items()}, **NO_ANSWER, **BROKEN}
    closing = {*TO_THE_END, *NO_ANSWER, *BROKEN, "close"}
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                case = body.get("case", "")
                if head.startswith(b"GET /v1/models"):
                    writer.write(sized(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'))
                elif case:
                    asked.append(case)
                    writer.write(answers[case])
                    await writer.drain()
                    if case in closing:
                        break
                else:
                    writer.write(sized(json.dumps(body).encode()))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 22)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


async def ask(session: aiohttp.ClientSession, **fields: object) -> tuple[int, bytes]:
    async with session.post("/v1/chat/completions", json={"model": "m", **fields}) as response:
        return response.status, await response.read()


async def check_others(session: aiohttp.ClientSession) -> None:
    """Everybody gets the answer to his own request."""
    for number in range(10):
        status, body = await ask(session, number=number)
        assert (status, json.loads(body)) == (200, {"model": "m", "number": number})


@pytest.mark.parametrize("name", [*PASSES, *TO_THE_END])
async def test_what_is_an_answer_passes(setup: Setup, name: str) -> None:
    expected = (PASSES | TO_THE_END)[name][1]
    async with odd_worker() as (url, asked):
        front = await setup.front(url)
        await front.until_ready(1)
        for _ in range(3):
            status, body = await ask(front.session, case=name)
            assert status in (200, 204, 299) and body == expected
            await check_others(front.session)
        assert asked == [name] * 3


@pytest.mark.parametrize("name", NO_ANSWER)
async def test_what_is_no_answer_is_an_error_after_a_second_try(setup: Setup, name: str) -> None:
    async with odd_worker() as (url, asked):
        front = await setup.front(url)
        await front.until_ready(1)
        status, body = await ask(front.session, case=name)
        assert status == 502 and json.loads(body)["error"]["code"] == "worker_failed", body
        assert url.rsplit(":", 1)[1].encode() not in body
        assert asked == [name] * 2
        await until(lambda: front.app.workers.all[0].ready)
        await check_others(front.session)
        await until(lambda: not front.app.proxy.active)


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_off_is_never_taken_for_whole(setup: Setup, name: str) -> None:
    async with odd_worker() as (url, _):
        front = await setup.front(url)
        await front.until_ready(1)
        try:
            status, body = await ask(front.session, case=name)
        except aiohttp.ClientError:
            pass
        else:
            assert status == 502 and json.loads(body)["error"]["code"] == "worker_failed"
        await until(lambda: front.app.workers.all[0].ready)
        await check_others(front.session)
