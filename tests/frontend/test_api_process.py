"""The process: command line, configuration errors, sockets, signals, draining, systemd's protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from api_program import API, api
from front_fixtures import Setup, streaming, until, write_keys

from syshaxd.frontend.__main__ import main
from syshaxd.frontend.config import EXAMPLE_HEADING, ApiConfig
from syshaxd.settings import example_toml

EVENT = b"data: 1\n\n"


async def output_of(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *API, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


RunHere = Callable[..., tuple[int, str]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunHere:
    """The command line in this process: exit status, and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["syshax-api", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out + printed.err

    return run


async def test_sigterm_finishes_streams_and_exits_0(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker(at="unix")
    worker.answer = streaming(*[EVENT] * 10, pause=0.1)
    async with api("--port", "0", "--worker", worker.url) as server, aiohttp.ClientSession() as idle:
        await server.ready()
        assert (await idle.get(f"{server.url}/health")).status == 200
        async with aiohttp.ClientSession() as session:
            response = await session.post(f"{server.url}/v1/chat/completions", json={"model": "m"})
            assert await response.content.readany() == EVENT
            server.process.send_signal(signal.SIGTERM)
            await until(lambda: "stopping: 1 requests" in server.log)
            last = await idle.get(f"{server.url}/health")
            assert last.status == 200 and last.headers["Connection"] == "close"
            with pytest.raises(aiohttp.ClientConnectorError):
                await idle.get(f"{server.url}/health")
            assert await response.read() == EVENT * 9
        assert await server.ended(3) == 0
        assert server.lines[-1].endswith("stopped") and "Traceback" not in server.log


async def test_draining_ends_at_its_limit_with_an_error_event(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker()
    worker.answer = streaming(EVENT, forever=True)
    config = tmp_path / "api.toml"
    config.write_text(f'port = 0\nworkers = ["{worker.url}"]\n[timeouts]\ndrain_seconds = 0.5\n')
    async with api("--config", str(config)) as server, aiohttp.ClientSession() as session:
        await server.ready()
        response = await session.post(f"{server.url}/v1/chat/completions", json={"model": "m"})
        server.process.send_signal(signal.SIGTERM)
        body = await response.read()
        assert body.startswith(EVENT) and b'"shutting_down"' in body
        assert await server.ended(3) == 0
    async with asyncio.timeout(1):
        await worker.cancelled.wait()


async def test_a_second_signal_leaves_at_once(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(EVENT, forever=True)
    async with api("--port", "0", "--worker", worker.url) as server, aiohttp.ClientSession() as session:
        await server.ready()
        response = await session.post(f"{server.url}/v1/chat/completions", json={"model": "m"})
        server.process.send_signal(signal.SIGINT)
        await until(lambda: "stopping: 1 requests" in server.log)
        server.process.send_signal(signal.SIGINT)
        assert await server.ended(1) == 1
        response.close()


async def test_no_request_that_was_taken_in_is_lost_when_stopped_under_load(setup: Setup) -> None:
    worker = await setup.worker()
    worker.answer = streaming(*[EVENT] * 5, pause=0.01)
    complete = 0
    async with api("--port", "0", "--worker", worker.url) as server:
        await server.ready()

        async def client(keep: bool) -> None:
            nonlocal complete
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=not keep)) as session:
                while True:
                    try:
                        response = await session.post(f"{server.url}/v1/completions", json={"model": "m"})
                    except aiohttp.ClientError:
                        return
                    assert response.status == 200 and await response.read() == EVENT * 5
                    complete += 1

        clients = [asyncio.create_task(client(keep=number % 2 == 0)) for number in range(20)]
        await asyncio.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await asyncio.gather(*clients)
        assert await server.ended(5) == 0
    assert complete >= 20 and len(worker.seen) == complete
    assert server.log.count("status=200") == complete and server.log.count("status=") == complete


async def test_sighup_reads_the_keys_again(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker()
    keys = write_keys(tmp_path / "keys", {"one": {}})
    arguments = ["--port", "0", "--worker", worker.url, "--keys-file", str(keys)]
    async with api(*arguments) as server, aiohttp.ClientSession() as session:
        await server.ready()

        async def status(key: str) -> int:
            async with session.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                return response.status

        assert (await status("one"), await status("two")) == (200, 401)
        write_keys(keys, {"two": {}})
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: "SIGHUP: 1 API keys" in server.log)
        assert (await status("one"), await status("two")) == (401, 200)
        keys.write_text("")
        server.process.send_signal(signal.SIGHUP)
        await until(lambda: "the old keys stay" in server.log)
        assert await status("two") == 200


async def test_systemd_socket_and_notifications(setup: Setup, tmp_path: Path) -> None:
    worker = await setup.worker()
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(tmp_path / "notify"))
    notify.setblocking(False)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    told: list[str] = []

    async def listen() -> None:
        while True:
            told.extend((await asyncio.get_running_loop().sock_recv(notify, 4096)).decode().splitlines())

    listener = asyncio.create_task(listen())
    script = (
        f'exec 3<&{listening.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" -m syshaxd.frontend --worker {worker.url}'
    )
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script,
        sys.executable,
        env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
        pass_fds=(listening.fileno(),),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:  # it waits in the socket, and its answer knows the workers
            response = await session.get(f"http://127.0.0.1:{port}/v1/models")
            assert response.status == 200
        await until(lambda: "READY=1" in told, 30)
        await until(lambda: "STATUS=ready: m" in told, 10)
        process.terminate()
        assert await process.wait() == 0
        await until(lambda: "STOPPING=1" in told)
    finally:
        listener.cancel()
        if process.returncode is None:
            process.kill()
        notify.close()
        listening.close()


async def test_an_occupied_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        status, out = await output_of("--port", port, "--worker", "http://127.0.0.1:1")
    assert status == 2 and time.monotonic() - start < 10
    assert f"error: cannot listen on 127.0.0.1:{port}: address already in use\nhint: another program" in out
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("arguments", "config", "expected"),
    [
        ([], "", "error: no worker to pass requests to\nhint: --worker http://HOST:PORT or"),
        (["--worker", "localhost:8000"], "", "command line: workers[0]: a worker is http://HOST:PORT or unix:PATH"),
        (["--worker", "http://h:1/v1"], "", "no path (not even /v1)"),
        (["--worker", "unix:relative"], "", "absolute path"),
        (["--worker", "http://h:1", "--worker", "http://h:1"], "", "worker http://h:1 is named twice"),
        (["--worker", "http://h:99999"], "", "out of range"),
        ([], "prot = 1", "api.toml: prot: unknown key\nhint: nearest valid key: port"),
        ([], "[limits]\nbody = 'many'", "api.toml: limits.body: "),
        ([], "[timeouts]\ndrain = 3", "nearest valid key: timeouts.drain_seconds"),
        ([], "port = 70000", "api.toml: port: input should be less than or equal to 65535 (value: 70000)"),
        ([], "port =", "not valid TOML"),
        (
            ["--worker", "http://h:1", "--keys-file", "/nonexistent/keys"],
            "",
            "keys_file /nonexistent/keys: no such",
        ),
        ([], "[groups.fast]\npriority = 'normal'", "error: no worker to pass requests to"),
        (["--worker", "http://h:1"], "[groups.default]", "api.toml: groups.default: `workers` makes a group"),
        (["--worker", "http://h:1"], "[groups.a]\nworkers = ['http://h:1']", "worker http://h:1 is in workers already"),
        ([], "[groups.a]\npriority = 'high'", "groups.a.priority: input should be 'interactive', 'normal' or 'batch'"),
        ([], "[groups.a]\nkey_file = '/nonexistent/key'", "error: key_file /nonexistent/key: no such file"),
        ([], "[groups.a]\nkey_file = '/dev/null'", "error: key_file /dev/null: is not one word"),
        ([], "[groups.a]\nworker = []", "nearest valid key: groups.a.workers"),
        ([], "[aliases]\na = 'b'\nb = 'c'", "aliases: `a` stands for `b`, which is an alias itself"),
        (["--worker", "http://h:1", "--host", "192.0.2.1"], "", "requested address"),
        (["--worker", "http://h:1", "--host", "no.such.host.invalid"], "", "cannot listen on no.such.host.invalid"),
    ],
)
def test_faults_of_the_configuration(
    run_here: RunHere, tmp_path: Path, arguments: list[str], config: str, expected: str
) -> None:
    file = tmp_path / "api.toml"
    file.write_text(config)
    status, out = run_here("--config", str(file), *arguments)
    assert status == 2 and expected in out, out
    assert "Traceback" not in out and all(line.startswith(("error: ", "hint: ")) for line in out.splitlines()), out


def test_check_config_and_drop_ins(run_here: RunHere, tmp_path: Path) -> None:
    file = tmp_path / "api.toml"
    file.write_text('workers = ["http://h:1"]\n')
    assert run_here("--config", str(file), "--check-config") == (0, "configuration is valid\n")
    (tmp_path / "api.toml.d").mkdir()
    (tmp_path / "api.toml.d" / "10.toml").write_text("port = -1\n")
    status, out = run_here("--config", str(file), "--check-config")
    assert status == 2 and "api.toml.d/10.toml: port" in out
    status, out = run_here("--config", str(tmp_path / "absent.toml"))
    assert status == 2 and "absent.toml: no such file" in out


def test_wrong_usage_exits_2(run_here: RunHere) -> None:
    status, out = run_here("--prot", "1")
    assert status == 2 and "--prot" in out


def test_the_example_file_is_the_schema() -> None:
    example = Path(__file__).parents[2] / "etc" / "syshax-api.toml"
    assert example.read_text() == example_toml(ApiConfig, EXAMPLE_HEADING)
