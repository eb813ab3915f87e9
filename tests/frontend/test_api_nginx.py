"""The TLS example, etc/nginx-syshax.conf, in a real nginx with a certificate of its own, on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web
from front_fixtures import FakeWorker, Front, Setup, error_of, silent, streaming, until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "etc" / "nginx-syshax.conf"
EVENT = b'data: {"choices":[{"delta":{"content":"\xe2\x98\x95"}}]}\n\n'
AROUND = """daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log notice;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/syshax.conf;
}}
"""


def nginx_program() -> str:
    """packaging/bootstrap.sh unpacks one; a system's own will do."""
    places = f"{ROOT}/build/nginx/usr/sbin:/usr/sbin:/usr/local/sbin:/usr/bin"
    found = shutil.which("nginx", path=places)
    assert found, "no nginx: packaging/bootstrap.sh nginx"
    return found


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    crt, key = folder / "crt", folder / "key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(key), "-out", str(crt), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return crt, key


def changed(text: str, **replacements: str) -> str:
    """The example with a test's addresses and paths; each must have been there exactly once."""
    for old, new in (
        ("127.0.0.1:8000", replacements["upstream"]),
        ("listen 443 ssl", f"listen 127.0.0.1:{replacements['port']} ssl"),
        ("/etc/nginx/syshax.crt", replacements["crt"]),
        ("/etc/nginx/syshax.key", replacements["key"]),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@dataclass
class Nginx:
    url: str
    session: aiohttp.ClientSession
    tls: ssl.SSLContext


@asynccontextmanager
async def running(upstream: str, folder: Path, certificate: tuple[Path, Path]) -> AsyncIterator[Nginx]:
    crt, key = certificate
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = changed(EXAMPLE.read_text(), upstream=upstream, port=str(port), crt=str(crt), key=str(key))
    (folder / "syshax.conf").write_text(text)
    (folder / "nginx.conf").write_text(AROUND.format(folder=folder))
    command = [nginx_program(), "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    process = await asyncio.create_subprocess_exec(*command)
    tls = ssl.create_default_context(cafile=str(crt))
    base = f"https://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(base, connector=aiohttp.TCPConnector(ssl=tls)) as session:
            async with asyncio.timeout(10):
                while not _listens(port):
                    assert process.returncode is None, (folder / "error.log").read_text()
                    await asyncio.sleep(0.02)
            yield Nginx(base, session, tls)
    finally:
        process.terminate()
        await process.wait()
    log = (folder / "error.log").read_text()
    assert not re.search(r"\[(alert|emerg|crit)\]", log), log


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def chain(
    setup: Setup, tmp_path: Path, certificate: tuple[Path, Path]
) -> AsyncIterator[tuple[Nginx, Front, FakeWorker]]:
    worker = await setup.worker()
    front = await setup.front(worker)
    async with running(f"127.0.0.1:{front.port}", tmp_path, certificate) as nginx:
        yield nginx, front, worker


async def test_each_event_passes_as_it_comes_and_a_disconnect_reaches_the_worker(
    chain: tuple[Nginx, Front, FakeWorker],
) -> None:
    nginx, _, worker = chain
    step = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for cut in (EVENT[:-6], EVENT[-6:], EVENT):  # the first ends within a character
            await response.write(cut)
            await step.wait()
            step.clear()
        await asyncio.Event().wait()
        return response

    worker.answer = answer
    response = await nginx.session.post("/v1/chat/completions", json={"model": "m", "stream": True})
    assert (response.status, response.content_type) == (200, "text/event-stream")
    for cut in (EVENT[:-6], EVENT[-6:], EVENT):
        async with asyncio.timeout(1):
            assert await response.content.readexactly(len(cut)) == cut
        step.set()
    assert not worker.cancelled.is_set()
    assert response.connection is not None and response.connection.transport is not None
    response.connection.transport.abort()
    async with asyncio.timeout(1):
        await worker.cancelled.wait()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_openai_client_that_gives_up_waiting_aborts_the_worker(
    chain: tuple[Nginx, Front, FakeWorker], stream: bool
) -> None:
    nginx, _, worker = chain
    worker.answer = silent
    http = openai.DefaultAsyncHttpxClient(verify=nginx.tls)
    async with openai.AsyncOpenAI(base_url=f"{nginx.url}/v1", api_key="none", http_client=http) as client:
        waiting = asyncio.create_task(client.chat.completions.create(model="m", messages=[], stream=stream))
        await until(lambda: bool(worker.seen))
        waiting.cancel()
        async with asyncio.timeout(1):
            await worker.cancelled.wait()


async def test_large_bodies_pass_and_too_large_ones_get_an_openai_error(
    chain: tuple[Nginx, Front, FakeWorker],
) -> None:
    nginx, _, worker = chain
    text = "x" * (20 << 20)
    async with nginx.session.post("/v1/completions", json={"model": "m", "prompt": text}) as response:
        assert json.loads(await response.read())["prompt"] == text
    response = await nginx.session.post("/v1/completions", data=b"x" * ((64 << 20) + 1))
    await error_of(response, 413, "request_too_large")
    assert len(worker.seen) == 1


async def test_the_request_id_is_kept_or_made(chain: tuple[Nginx, Front, FakeWorker]) -> None:
    nginx, _, worker = chain
    for given in ("mine", None):
        headers = {"X-Request-Id": given} if given else {}
        async with nginx.session.post("/v1/completions", json={"model": "m"}, headers=headers) as response:
            told = response.headers.getall("x-request-id")
        seen = [value for name, value in worker.seen[-1].headers if name.lower() == "x-request-id"]
        assert told == seen and len(told) == 1 and (told == [given] if given else len(told[0]) == 32)
    assert dict(worker.seen[-1].headers)["X-Forwarded-Proto"] == "https"


async def test_a_front_end_that_is_away_is_an_openai_error(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    async with running("127.0.0.1:1", tmp_path, certificate) as nginx:
        response = await nginx.session.post("/v1/completions", json={"model": "m"})
        assert response.headers["Retry-After"] == "1"
        await error_of(response, 503, "not_ready")


async def test_the_front_ends_own_errors_pass_unchanged(
    setup: Setup, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    front = await setup.front("http://127.0.0.1:1")
    async with running(f"127.0.0.1:{front.port}", tmp_path, certificate) as nginx:
        for path in ("/ready", "/v1/models"):
            async with front.session.get(path) as direct, nginx.session.get(path) as through:
                assert (through.status, await through.read()) == (direct.status, await direct.read())


async def test_the_openai_client_over_tls(chain: tuple[Nginx, Front, FakeWorker]) -> None:
    nginx, _, worker = chain
    worker.answer = streaming(EVENT, EVENT, b"data: [DONE]\n\n", pause=0.01)
    http = openai.DefaultAsyncHttpxClient(verify=nginx.tls)
    async with openai.AsyncOpenAI(base_url=f"{nginx.url}/v1", api_key="none", http_client=http) as client:
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "☕☕"


def test_nginx_waits_longer_than_the_front_end() -> None:
    from syshaxd.frontend.config import Limits, Timeouts

    found = re.search(r"proxy_read_timeout (\d+)s", EXAMPLE.read_text())
    assert found and int(found[1]) > max(Timeouts().first_byte_seconds, Timeouts().idle_seconds)
    size = re.search(r"client_max_body_size\s+(\d+)m", EXAMPLE.read_text())
    assert size and int(size[1]) << 20 == Limits().body
