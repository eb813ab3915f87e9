"""The processes of the end-to-end tests as objects: the daemon, an engine driven line by line, a worker's server.

Starting, asking, killing and cleaning up, with the log's end in the message when something does not come up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference import ALL_PROMPTS

from syshax.control import Control
from syshax.errors import SyshaxError
from syshax.protocol import ModelInfo, ModelsAnswer, SessionsAnswer, StatusAnswer

HERE = Path(__file__).parent
START_LIMIT_S = 240.0
# Comparisons are not to be measured beside the writing of a packed model.
os.environ["SYSHAX_CACHE_ENABLED"] = "false"
AMOUNTS = {"qwen3_30b_a3b": (2, 12)}
"""Prompts and new tokens by model, where four and 24 would take too long."""


def amount(name: str) -> tuple[list[str], int]:
    """The prompts and the number of new tokens with which a model is compared."""
    prompts, new_tokens = AMOUNTS.get(name, (4, 24))
    return ALL_PROMPTS[:prompts], new_tokens


def wait_until(true: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(0.05)


def pss_bytes(pid: int) -> int:
    """Memory of a process; pages shared with others count in parts."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def mapped_in_shm(pid: int) -> set[str]:
    """Paths in /dev/shm that still have their name, of what a process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")}
    return set()


class Daemon:
    """A syshaxd of the test's own; may be killed and started again in the same runtime directory."""

    def __init__(self, base: Path, config: str = "") -> None:
        self.runtime_dir, self.log = base / "run", base / "syshaxd.log"
        self.command = [sys.executable, "-m", "syshaxd", "--user", "--runtime-dir", str(self.runtime_dir)]
        self.command += ["--state-dir", str(base / "state")]
        if config:
            (base / "syshaxd.toml").write_text(config)
            self.command += ["--config", str(base / "syshaxd.toml")]
        self.control = Control(self.runtime_dir)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self.is_up, 30, "syshaxd is up")

    def is_up(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.status().state in ("ready", "degraded")
        except SyshaxError:
            return False

    def status(self) -> StatusAnswer:
        return self.control.get("/v1/status", StatusAnswer)

    def model(self, name: str) -> ModelInfo:
        return next(m for m in self.control.get("/v1/models", ModelsAnswer).models if m.name == name)

    def sessions(self) -> SessionsAnswer:
        return self.control.get("/v1/sessions", SessionsAnswer)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


class EngineProcess:
    """engine.py in a process: `call` sends a command and returns the answer."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        read, write = os.pipe()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine.py"), str(write)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[write],
                env=os.environ | environment,
            )
        os.close(write)
        self.answers = os.fdopen(read)

    def send(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, limit_s: float = START_LIMIT_S) -> dict[str, Any]:
        readable, _, _ = select.select([self.answers], [], [], limit_s)
        line = self.answers.readline() if readable else ""
        assert line, f"the engine did not answer; its log ends:\n{self.log.read_text(errors='replace')[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, do: str, **fields: Any) -> dict[str, Any]:
        self.send(do, **fields)
        return self.receive()

    def start(self, model: Path, **options: Any) -> None:
        answer = self.call("start", options={"model": str(model), **options})
        assert answer == {"ok": True}, answer

    def ask(self, name: str) -> None:
        """Starts generating; the answer is received later."""
        prompts, new_tokens = amount(name)
        self.send("generate", prompts=prompts, new_tokens=new_tokens)

    def generate(self, name: str) -> dict[str, Any]:
        self.ask(name)
        answer = self.receive()
        assert "error" not in answer, answer
        return answer

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError, OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.answers.close()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class WorkerServer:
    """`syshax-worker MODEL words...` listening on a Unix socket."""

    def __init__(self, base: Path, model: Path, runtime_dir: Path, *words: str) -> None:
        self.log, self.socket, self.model = base / "worker.log", base / "worker.sock", model
        command = [sys.executable, "-m", "syshax.vllm.launcher", str(model), "--runtime-dir", str(runtime_dir)]
        command += ["--uds", str(self.socket), "--dtype", "float32", "--max-model-len", "512", *words]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 120.0) -> Any:
        """(status, parsed body or None)."""
        connection = UnixConnection(self.socket, timeout)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, body=data, headers={"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if content else None
        finally:
            connection.close()

    def is_up(self) -> bool:
        tail = self.log.read_text(errors="replace")[-4000:]
        assert self.process.poll() is None, f"the worker ended with {self.process.returncode}:\n{tail}"
        try:
            return bool(self.request("GET", "/health")[0] == 200)
        except OSError:
            return False

    def wait(self) -> None:
        wait_until(self.is_up, START_LIMIT_S, "the worker's server is up")

    def tokens(self, name: str) -> list[list[int]]:
        prompts, new_tokens = amount(name)
        body = {
            "model": self.model.name,
            "prompt": prompts,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    def tree(self) -> list[int]:
        """Its process and all descendants."""
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    todo += map(int, (task / "children").read_text().split())
        return found

    def stop(self) -> int:
        """SIGTERM, as an init system would; the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """kill -9 of the whole tree, which leaves in /dev/shm what vLLM keeps there: that is removed."""
        tree = self.tree()
        named = {name for pid in tree for name in mapped_in_shm(pid)}
        for pid in tree:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for name in named:
            Path(name).unlink(missing_ok=True)
