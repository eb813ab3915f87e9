"""Keys and bodies never reach a log, a metric or an error, whatever the level and whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging

import pytest
from front_fixtures import Setup, cut_after, until, write_keys

KEY, SECRET = "sk-very-secret-key", "my private prompt"
BODY = f'{{"model": "m", "prompt": "{SECRET}"}}'.encode()


def post(*lines: str, body: bytes = BODY, path: str = "/v1/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: h", f"Authorization: Bearer {KEY}", *lines, f"Content-Length: {len(body)}"]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


REQUESTS = [
    post(),
    post(path="/nope"),
    post("X-A: \0"),
    post("X A: 1"),
    post().replace(KEY.encode(), KEY.encode() + b"\x01"),
    post().replace(b"Bearer", b"Basic"),
    post(body=BODY[:-1]),
    post(body=BODY.replace(b'"m"', b'"other"')),
    post("Content-Encoding: gzip"),
    post("X-Odd: ä").replace("ä".encode(), b"\xff"),
    post("Transfer-Encoding: chunked"),
    post().replace(b"HTTP/1.1", b"HTTP/9.9"),
]


async def test_no_key_and_no_prompt_is_told_to_anybody(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = setup.folder / "keys"
    write_keys(keys, {KEY: {}})
    worker = await setup.worker()
    front = await setup.front(worker, keys=keys)
    answers = b""
    for answer in (cut_after(), cut_after(b"data: 1\n\n")):
        worker.answer = answer
        for request in REQUESTS:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(request)
            try:
                async with asyncio.timeout(0.3):
                    while part := await reader.read(65536):
                        answers += part
            except (TimeoutError, ConnectionError):
                pass
            writer.close()
    await until(lambda: not front.app.proxy.active)
    text = caplog.text + repr([vars(record) for record in caplog.records if record.name.startswith("syshax")])
    for told in (text, answers.decode("utf-8", "replace"), front.app.metrics.render().decode()):
        assert "secret" not in told and "private prompt" not in told
    assert "worker_failed" in answers.decode("utf-8", "replace"), "requests did reach the worker"
