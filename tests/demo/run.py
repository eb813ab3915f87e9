"""The demo: the product's own path from an OpenAI client to the experts' kernels, started, asked, explained, stopped.

Starts syshaxd, a vLLM worker (through syshax-worker) and syshax-api as a user would, in a private runtime directory;
nothing is stubbed. Owns only the choreography: every figure it prints comes from the services' own interfaces.

    python tests/demo/run.py --model DIR [--format q8_0] [--question TEXT] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
QUESTION = "What is the capital of France?"
NAME = "demo"
START_LIMIT_S = 600.0


class DemoError(Exception):
    """Something that the demo started did not do its part; the message says what and where its log is."""


class Service:
    """One child process with its log file."""

    def __init__(self, name: str, command: list[str], logs: Path, env: dict[str, str]) -> None:
        self.name, self.log = name, logs / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    def check(self) -> None:
        code = self.process.poll()
        if code is not None:
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            raise DemoError(f"{self.name} ended with exit status {code}; the end of its log:\n  " + "\n  ".join(tail))

    def stop(self, limit_s: float = 20.0) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                say(f"{self.name} did not stop within {limit_s:.0f} s; killing it")
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def ctl(runtime_dir: Path, *words: str) -> Any:
    """syshaxctl --json: the parsed answer; None while the daemon does not answer."""
    command = [str(BIN / "syshaxctl"), "--runtime-dir", str(runtime_dir), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def http_status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(what: str, services: list[Service], ready: Callable[[], bool], limit_s: float = START_LIMIT_S) -> None:
    """Polls ready() twice a second; the seconds go by on a terminal, and a service that ends is reported at once."""
    start = time.monotonic()
    while not ready():
        for service in services:
            service.check()
        waited = time.monotonic() - start
        if waited > limit_s:
            raise DemoError(f"{what} is not ready after {limit_s:.0f} s; logs: {services[0].log.parent}")
        if sys.stdout.isatty():
            print(f"\r    waiting for {what}: {waited:.0f} s", end="", flush=True)
        time.sleep(0.5)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def summed_pss(pid: int) -> int:
    """Bytes of the process tree: a shared page counts once, divided among those who share it."""
    total, todo = 0, [pid]
    while todo:
        current = Path(f"/proc/{todo.pop()}")
        try:
            rollup = (current / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
            for task in (current / "task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def ask(url: str, question: str, max_tokens: int) -> dict[str, Any]:
    """Streams one answer through the official client; prints it as it arrives."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    start = time.monotonic()
    arrivals: list[float] = []
    pieces: list[str] = []
    usage = None
    print(f"\n  You:    {question}\n  Model:  ", end="", flush=True)
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": question}],
        stream=True,
        temperature=0,
        max_completion_tokens=max_tokens,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic())
            pieces.append(chunk.choices[0].delta.content)
            print(pieces[-1], end="", flush=True)
        usage = chunk.usage or usage
    print("\n", flush=True)
    text = "".join(pieces)
    if usage is None or not text.strip():
        raise DemoError("the stream ended without an answer" if usage else "the stream ended without its usage")
    return {
        "text": text,
        "tokens": usage.completion_tokens,
        "first_s": arrivals[0] - start,
        "decode_s": arrivals[-1] - arrivals[0],
        "total_s": time.monotonic() - start,
    }


def session_totals(runtime_dir: Path) -> dict[str, float]:
    sessions = (ctl(runtime_dir, "sessions") or {"sessions": []})["sessions"]
    keys = ("requests", "compute_ms_total", "client_wait_ms_total")
    return {key: sum(session[key] for session in sessions) for key in keys}


def report(answer: dict[str, Any], spent: dict[str, float], status: Any, worker: Service) -> None:
    total, experts = answer["total_s"], spent["compute_ms_total"] / 1000
    ring = max(spent["client_wait_ms_total"] / 1000 - experts, 0.0)
    rate = (answer["tokens"] - 1) / answer["decode_s"] if answer["decode_s"] > 0 else 0.0
    print(f"  {answer['tokens']} tokens, {rate:.1f} tokens/s after the first, which took {answer['first_s']:.2f} s")
    print("  where the time went:")
    shares = {
        "attention, router and the rest (vLLM)": max(total - experts - ring, 0.0),
        "ring (shared memory, waking up)": ring,
        "experts (syshaxd)": experts,
    }
    for label, seconds in shares.items():
        print(f"    {label:<40} {seconds * 1000:8.0f} ms  {100 * seconds / total:5.1f} %")
    model = next(m for m in status["models"] if m["name"] == NAME)
    layers = model["geometry"]["num_layers"]
    print(f"  {spent['requests']:.0f} layer requests: {layers} layers x {spent['requests'] / layers:g} forward passes")
    print("  memory:")
    for node in status["nodes"]:
        cpus = ",".join(map(str, node["cpus"])) or "any"
        pool = f"{node['pool_bytes'] / 2**20:.0f} MiB of experts as {model['format']}"
        print(f"    node {node['node']}: {pool}; {node['threads']} threads on CPUs {cpus}")
    print(f"    worker: {summed_pss(worker.process.pid) / 2**20:.0f} MiB, no expert weights among them")
    print(f"  kernels: {', '.join(sorted(set(model['kernels'].values())))}\n")


def print_next_steps(model: Path) -> None:
    print("  to look further:")
    print(f"    export PATH={BIN}:$PATH SYSHAX_RUNTIME_DIR=/tmp/syshax")
    print("    syshaxd --user &                                 # the daemon, as yourself")
    print(f"    syshaxctl load {model} --name demo --format q4_0 --wait")
    print("    syshaxctl status     # also: models, topology, kernels, config show, doctor")
    print(f"    syshax-worker {model} --syshax-model demo --port 8001 &")
    print("    syshax-api --worker http://127.0.0.1:8001 &      # then: curl http://127.0.0.1:8000/v1/models")
    print("    syshaxd bench moe --shape qwen3-30b-a3b --format q8_0 --tokens 1,16,256\n")


def run(options: argparse.Namespace, base: Path, stack: ExitStack) -> None:
    runtime_dir, port = base / "run", free_port()
    url = f"http://127.0.0.1:{port}"
    # Nothing of the demo is left behind: no packed model in the user's cache either.
    quiet = {"HF_HUB_OFFLINE": "1", "SYSHAX_CACHE_ENABLED": "false"}
    env = os.environ | {"SYSHAX_RUNTIME_DIR": str(runtime_dir), **quiet}

    def start(name: str, *words: str | Path) -> Service:
        service = Service(name, [str(BIN / words[0]), *map(str, words[1:])], base, env)
        stack.callback(service.stop)
        return service

    say("starting syshaxd")
    daemon = start("syshaxd", "syshaxd", "--user", "--runtime-dir", runtime_dir, "--state-dir", base / "state")
    wait_for("syshaxd", [daemon], lambda: ctl(runtime_dir, "status") is not None, 60)
    say("starting a vLLM worker and syshax-api; meanwhile syshaxd loads the experts")
    socket_path = base / "worker.sock"
    load = [str(BIN / "syshaxctl"), "--runtime-dir", str(runtime_dir), "load", str(options.model)]
    load += ["--name", NAME, "--format", options.format]
    if subprocess.run(load, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise DemoError("the model could not be loaded; see above")
    worker = start(
        *("worker", "syshax-worker", options.model, "--syshax-model", NAME, "--served-model-name", NAME),
        *("--uds", socket_path, "--max-model-len", "2048", "--enforce-eager"),
    )
    api = start("syshax-api", "syshax-api", "--port", str(port), "--worker", f"unix:{socket_path}")
    if subprocess.run([*load, "--wait"], check=False).returncode != 0:
        raise DemoError("the model could not be loaded; see above")
    services = [worker, api, daemon]
    wait_for("the worker (vLLM starts, attaches, warms up)", services, lambda: http_status(f"{url}/ready") == 200)
    before = session_totals(runtime_dir)
    answer = ask(url, options.question, options.max_tokens)
    after = session_totals(runtime_dir)
    report(answer, {key: after[key] - before[key] for key in after}, ctl(runtime_dir, "status"), worker)
    print_next_steps(options.model)
    if options.expect not in answer["text"]:
        raise DemoError(f"the answer does not say {options.expect!r}")


def leftovers(base: Path) -> list[str]:
    found = [f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir() if "syshax" in entry.name]
    mark = f"SYSHAX_RUNTIME_DIR={base}/".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if mark in (process / "environ").read_bytes():
                    found.append(f"process {process.name}")
            except OSError:
                continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="syshax demo")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--format", default="q8_0", choices=["bf16", "fp16", "q8_0", "q4_0"])
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--expect", default="Paris", help="a word that the answer must hold")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    options = parser.parse_args()
    options.model = options.model.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base = Path(tempfile.mkdtemp(prefix="syshax-demo-"))
    code = 1
    try:
        with ExitStack() as stack:
            run(options, base, stack)
            say("stopping everything")
        code = 0
    except DemoError as error:
        print(f"error: {error}\nhint: all logs are in {base}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    if left := leftovers(base):
        print(f"error: left behind: {', '.join(left)}", file=sys.stderr)
        return 1
    if code == 0:
        say("done; nothing is left running")
    if code == 0 and not options.keep:
        shutil.rmtree(base, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
