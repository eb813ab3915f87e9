"""A fake control API on a Unix socket, with a machine worth looking at, and the command line run in this process."""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from syshax.errors import SyshaxError
from syshax.protocol import (
    Check,
    ConfigAnswer,
    ConfigChangeAnswer,
    DoctorAnswer,
    Dtype,
    Geometry,
    KernelInfo,
    KernelsAnswer,
    ModelInfo,
    ModelsAnswer,
    ModelState,
    NodeInfo,
    Priority,
    Progress,
    SessionInfo,
    SessionsAnswer,
    StatusAnswer,
    TopologyAnswer,
    UnloadAnswer,
)

GIB = 1 << 30
BOOT = "5f0c2b7a9d3e4f10"

READY = ModelInfo(
    name="Qwen3-30B-A3B",
    path="/models/Qwen3-30B-A3B",
    format="q8_0",
    state=ModelState.READY,
    configured=True,
    architecture="Qwen3MoeForCausalLM",
    geometry=Geometry(
        num_layers=48, num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8, layer_ids=list(range(48))
    ),
    fingerprint="ab" * 16,
    node_bytes={0: 15 * GIB, 1: 15 * GIB},
    kernels={Dtype.FLOAT32: "q8_0_f32_avx512", Dtype.BFLOAT16: "q8_0_int8_avx512", Dtype.FLOAT16: "q8_0_int8_avx512"},
    sessions=2,
    forward_calls=1_234_567,
)
LOADING = ModelInfo(
    name="mixtral",
    path="/models/mixtral",
    format="q4_0",
    state=ModelState.LOADING,
    progress=Progress(
        stage="converting",
        layers_done=12,
        layers_total=32,
        bytes_done=9 * GIB,
        bytes_total=24 * GIB,
        seconds=83.0,
    ),
)
FAILED = ModelInfo(
    name="broken",
    path="/models/broken",
    format="bf16",
    state=ModelState.FAILED,
    reason="model.layers.3.mlp.experts.7.up_proj.weight has shape [700, 2048], expected [768, 2048]",
)
WAITING = ModelInfo(name="later", path="/models/later", format="fp16", state=ModelState.CONFIGURED)

NODES = [
    NodeInfo(
        node=number,
        cpus=list(range(16 * number, 16 * number + 16)) + list(range(64 + 16 * number, 64 + 16 * number + 16)),
        threads=16,
        share=0.5,
        memory_bytes=256 * GIB,
        free_bytes=190 * GIB,
        pool_bytes=15 * GIB,
        huge_bytes=15 * GIB if number == 0 else 5 * GIB,
        busy_fraction=0.83 if number == 0 else 0.07,
    )
    for number in range(2)
]


def session(number: int, **changes: Any) -> SessionInfo:
    fields: dict[str, Any] = {
        "session_id": number,
        "model": "Qwen3-30B-A3B",
        "client": f"vllm-worker {number}",
        "pid": 4000 + number,
        "uid": 990,
        "priority": Priority.NORMAL,
        "attached_seconds": 7300.0,
        "max_tokens": 8192,
        "num_slots": 2,
        "shm_bytes": 300 << 20,
        "requests": 98765,
        "tokens": 1_234_567,
        "errors": 0,
        "in_flight": 1,
        "queued_ms_total": 9876.0,
        "compute_ms_total": 234567.0,
        "last_active_seconds": 0.4,
    }
    return SessionInfo(**{**fields, **changes})


def answers() -> dict[str, BaseModel]:
    """Route -> what the fake answers; tests change their own copy."""
    models = [READY, LOADING, FAILED, WAITING]
    return {
        "GET /v1/status": StatusAnswer(
            version="0.1.0",
            boot_id=BOOT,
            pid=1234,
            state="ready",
            uptime_seconds=8000.0,
            cpu="Intel(R) Xeon(R) Platinum 8480+",
            isa="avx2",
            isa_best="avx512",
            nodes=NODES,
            models=models,
            sessions=2,
            requests_completed=1_234_567,
            requests_failed=3,
            tokens=45_678_901,
            compute_seconds=4567.0,
            pool_bytes=30 * GIB,
            memory_limit_bytes=200 * GIB,
            warnings=[
                "SYSHAX_ISA=avx2 keeps kernels below what this CPU can do (avx512): expect less than half the speed"
            ],
        ),
        "GET /v1/models": ModelsAnswer(boot_id=BOOT, models=models),
        "GET /v1/sessions": SessionsAnswer(boot_id=BOOT, sessions=[session(1), session(2, stale=True, errors=4)]),
        "GET /v1/topology": TopologyAnswer(
            boot_id=BOOT,
            source="hwloc",
            nodes=[
                {
                    "node": number,
                    "memory_bytes": 256 * GIB,
                    "cores": [[16 * number + core, 64 + 16 * number + core] for core in range(16)],
                }
                for number in range(2)
            ],
            allowed_cpus=[*range(32), *range(64, 96)],
            quota_cpus=24.0,
            plan=NODES,
        ),
        "GET /v1/kernels": KernelsAnswer(
            boot_id=BOOT,
            cpu_features=["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni"],
            isa="avx2",
            kernels=[
                KernelInfo(
                    name=f"{weight}_{activation}_{isa}",
                    format=weight,
                    activation=activation,
                    isa=isa,
                    packing="rows16",
                    usable=isa != "avx512",
                    chosen_for=[Dtype.FLOAT32, Dtype.BFLOAT16] if isa == "avx2" else [],
                )
                for weight, activation in (("bf16", "float32"), ("q8_0", "int8"))
                for isa in ("scalar", "avx2", "avx512")
            ],
        ),
        "GET /v1/config": ConfigAnswer(
            boot_id=BOOT,
            effective={
                "compute": {"nodes": [0, 1], "threads": 0},
                "limits": {"memory_bytes": 200 * GIB, "sessions": 16},
                "log": {"level": "info"},
                "models": {"later": {"path": "/models/later", "autoload": False}},
            },
            sources={"compute.nodes": "/etc/syshax/syshaxd.toml", "limits.sessions": "state"},
            needs_restart=["compute.threads"],
        ),
        "PATCH /v1/config": ConfigChangeAnswer(
            boot_id=BOOT,
            applied=["log.level"],
            needs_restart=["compute.threads"],
            message="kept in the state directory",
        ),
        "POST /v1/config/reload": ConfigChangeAnswer(boot_id=BOOT, applied=[], needs_restart=[], unchanged=[]),
        "GET /v1/doctor": DoctorAnswer(
            boot_id=BOOT,
            checks=[
                Check(name="huge pages", ok=True, message="30 of 30 GiB of experts lie on huge pages"),
                Check(
                    name="ISA",
                    ok=False,
                    level="warning",
                    message="kernels for avx2 are used, this CPU can do avx512",
                    hint="remove SYSHAX_ISA from the unit's environment",
                ),
            ],
        ),
        "POST /v1/models": LOADING,
        "GET /v1/models/mixtral": LOADING,
        "DELETE /v1/models/mixtral": UnloadAnswer(boot_id=BOOT, name="mixtral", state="unloaded"),
    }


Reply = BaseModel | SyshaxError | bytes


@dataclass
class FakeControl:
    """Answers by route; a value may be a message, an error, raw bytes, or a function that makes one."""

    folder: Path
    replies: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def reply(self, route: str, body: Any) -> tuple[int, bytes]:
        self.asked.append((route, body))
        found = self.replies.get(route) or self.replies.get(route.split("?")[0])
        if callable(found):
            found = found()
        if isinstance(found, SyshaxError):
            error = {"code": found.code, "message": found.message, "hint": found.hint}
            return found.http_status, json.dumps({"error": error}).encode()
        if isinstance(found, BaseModel):
            return 200, found.model_dump_json().encode()
        if isinstance(found, bytes):
            return 200, found
        error = {"code": "not_found", "message": f"no {route}", "hint": ""}
        return 404, json.dumps({"error": error}).encode()


def serve(control: FakeControl) -> socketserver.ThreadingUnixStreamServer:
    """Listens on control.sock in the fake's folder, in threads."""

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = control.reply(f"{self.command} {self.path}", json.loads(data) if data else None)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Syshax-Boot-Id", BOOT)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = do_DELETE = _any

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def address_string(self) -> str:
            return "client"

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server(str(control.folder / "control.sock"), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


@pytest.fixture
def control(tmp_path: Path) -> Iterator[FakeControl]:
    fake = FakeControl(tmp_path, answers())
    server = serve(fake)
    yield fake
    server.shutdown()
    server.server_close()


@dataclass
class Ran:
    status: int
    out: str
    err: str


RunCtl = Callable[..., Ran]


@pytest.fixture
def ctl(control: FakeControl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCtl:
    """`ctl("status", width=80)`: syshaxctl against the fake, in this process. doctor looks at no socket or unit."""
    from syshax.ctl.__main__ import main
    from syshax.doctor.caller import daemon

    monkeypatch.setattr("syshax.doctor.examination.check_caller", lambda caller: list(daemon(caller)))

    def run(*arguments: str, width: int = 80, runtime_dir: Path | None = None) -> Ran:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.argv", ["syshaxctl", "--runtime-dir", str(runtime_dir or control.folder), *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return Ran(int(left.value.code or 0), printed.out, printed.err)

    return run


if (
    __name__ == "__main__"
):  # to look at the screens: python ctl_fixtures.py FOLDER; SYSHAX_RUNTIME_DIR=FOLDER syshaxctl …
    import sys

    looked_at = FakeControl(Path(sys.argv[1]), answers())
    began = time.monotonic()

    def progressing() -> ModelInfo:
        part = min(1.0, (time.monotonic() - began) / 8)
        done = Progress(
            stage="converting", layers_done=int(32 * part), layers_total=32,
            bytes_done=int(24 * GIB * part), bytes_total=24 * GIB, seconds=8 * part,
        )  # fmt: skip
        return LOADING.model_copy(
            update={"progress": done, "state": ModelState.READY if part == 1 else ModelState.LOADING}
        )

    looked_at.replies["GET /v1/models/mixtral"] = progressing
    with contextlib.suppress(FileNotFoundError):
        os.unlink(looked_at.folder / "control.sock")  # noqa: PTH108
    serve(looked_at)
    threading.Event().wait()
