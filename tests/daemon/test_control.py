"""The control API over its real socket: every route, every error in one form, rights, bodies, states of models."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from conftest import Daemon, eventually
from fake_core import CLOSING_OFFSET, FakeCore
from prometheus_client.parser import text_string_to_metric_families

import syshax.protocol as protocol
from syshax.errors import ERRORS, NotAllowedError, UnknownModelError
from syshax.protocol import Closing, ErrorAnswer, LoadRequest, ModelInfo, StatusAnswer
from syshax.routes import ROUTES
from syshaxd.control.rights import Rights
from syshaxd.peers import Peer, peer_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("route", [route for route in ROUTES if route.startswith("GET /v1")])
async def test_answers_have_their_promised_form_and_the_boot_id(daemon: Daemon, route: str) -> None:
    path = route.split()[1].replace("{name}", "tiny")
    status, headers, body = await daemon.http("GET", path)
    assert status == 200 and headers["content-type"].startswith("application/json")
    answer = getattr(protocol, ROUTES[route]).model_validate_json(body)
    boot_id = headers["x-syshax-boot-id"]
    assert len(boot_id) == 32
    if hasattr(answer, "boot_id"):
        assert answer.boot_id == boot_id


async def test_status_tells_nodes_models_and_isa(daemon: Daemon) -> None:
    status: StatusAnswer = await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)
    assert (status.state, status.isa, status.isa_best) == ("ready", "avx512", "avx512")
    assert status.pool_bytes == status.nodes[0].pool_bytes == 288 << 10 == sum(status.models[0].node_bytes.values())
    assert status.models[0].kernels["float32"] == "bf16_f32_avx512" and not status.warnings
    assert status.nodes[0].cpus == sorted(os.sched_getaffinity(0)) and status.pid == os.getpid()


@pytest.mark.parametrize(
    ("method", "path", "code", "status"),
    [
        ("GET", "/", "not_found", 404),
        ("GET", "/v1/nothing", "not_found", 404),
        ("PUT", "/v1/status", "not_found", 404),
        ("GET", "/v1/models/nobody", "unknown_model", 404),
        ("DELETE", "/v1/models/nobody", "unknown_model", 404),
        ("DELETE", "/v1/models/tiny?force=yes", "invalid_argument", 400),
        ("DELETE", "/v1/sessions/7", "unknown_session", 404),
        ("DELETE", "/v1/sessions/x", "invalid_argument", 400),
        ("DELETE", "/v1/sessions/99999999999999999999999", "invalid_argument", 400),
    ],
)
async def test_errors_have_one_form(daemon: Daemon, method: str, path: str, code: str, status: int) -> None:
    got, headers, body = await daemon.http(method, path)
    error = ErrorAnswer.model_validate_json(body).error
    assert (got, error.code) == (status, code) == (ERRORS[code].http_status, code)
    assert error.message and len(headers["x-syshax-boot-id"]) == 32


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "the body"),
        (b"\xff", "not JSON"),
        (b'{"name": "a/b"}', "name"),
        (b'{"name": "x", "pth": "/m"}', "pth is not a field of LoadRequest"),
        (b'{"name": "x", "path": "/m", "format": "q9"}', "format"),
        (b'{"path": "/m"}', "name"),
        (b'{"name": "x", "path": "relative"}', "not absolute"),
        (b'{"name": "x", "path": "/a\\u0000b"}', "not absolute"),
        (b'{"name": "' + b"x" * 200 + b'"}', "name"),
    ],
)
async def test_bodies_that_make_no_sense_name_the_field(daemon: Daemon, body: bytes, words: str) -> None:
    status, _, answer = await daemon.http("POST", "/v1/models", body)
    error = json.loads(answer)["error"]
    assert status == 400 and error["code"] == "invalid_argument" and words in error["message"]


async def test_large_bodies_are_refused_with_or_without_their_length(daemon: Daemon) -> None:
    status, _, answer = await daemon.http("POST", "/v1/models", b" " * (2 << 20))
    assert status == 413 and json.loads(answer)["error"]["code"] == "too_large"
    reader, writer = await asyncio.open_unix_connection(daemon.runtime_dir / "control.sock")
    writer.write(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write((b"80000\r\n" + b" " * 0x80000 + b"\r\n") * 3)
    assert b"413" in await reader.readline()
    writer.close()


async def test_a_body_that_never_comes_ends_in_an_error(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syshaxd.control.app.BODY_SECONDS", 0.2)
    reader, writer = await asyncio.open_unix_connection(daemon.runtime_dir / "control.sock")
    writer.write(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert b"400" in await reader.readline()
    writer.close()


async def test_a_fault_of_ours_is_an_internal_error_without_details(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(daemon.core, "cpu_name", lambda: 1 / 0)
    status, answer = await daemon.json("GET", "/v1/status")
    assert status == 500 and answer["error"]["code"] == "internal" and "division" not in json.dumps(answer)
    monkeypatch.undo()
    assert (await daemon.json("GET", "/v1/status"))[0] == 200


async def test_loading_is_idempotent_and_names_conflicts(daemon: Daemon, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", seed=1)
    request = {"name": "two", "path": str(tmp_path / "other"), "format": "q8_0"}
    status, info = await daemon.json("POST", "/v1/models", request)
    assert status == 202 and info["state"] == "loading"
    await daemon.until("two", "ready")
    for same in (request, {"name": "two"}, {**request, "path": f"{tmp_path}/other/../other/"}):
        assert (await daemon.json("POST", "/v1/models", same))[1]["state"] == "ready"
    for other in ({**request, "format": "q4_0"}, {**request, "path": str(tmp_path / "tiny")}):
        status, answer = await daemon.json("POST", "/v1/models", other)
        assert status == 409 and answer["error"]["code"] == "model_exists"
    assert len(daemon.core.runtime.models) == 2


async def test_a_failed_load_stays_visible_and_can_be_repeated(start: Callable[..., Any], tmp_path: Path) -> None:
    daemon = await start(f'[models.m]\npath = "{tmp_path / "m"}"\nautoload = true\n')
    info = await daemon.until("m", "failed")
    assert "is not a directory" in info["reason"] and info["configured"]
    status = await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)
    assert status.state == "degraded" and "model m failed" in status.reason
    connection, answer, _ = await daemon.attach({"model": "m", "max_tokens": 1})
    assert answer["error"]["code"] == "model_not_ready" and "is not a directory" in answer["error"]["message"]
    connection.close()
    write_checkpoint(tmp_path / "m")
    await daemon.json("POST", "/v1/models", {"name": "m"})
    await daemon.until("m", "ready")
    assert (await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)).state == "ready"


async def test_internal_faults_while_loading_are_states_too(daemon: Daemon, tmp_path: Path) -> None:
    daemon.core.load_error = RuntimeError("boom")
    await daemon.json("POST", "/v1/models", {"name": "x", "path": str(tmp_path / "tiny")})
    assert "internal error" in (await daemon.until("x", "failed"))["reason"]
    assert (await daemon.json("DELETE", "/v1/models/x"))[1]["state"] == "unloaded"
    assert (await daemon.json("GET", "/v1/models/x"))[0] == 404


async def test_progress_cancel_and_the_queue(daemon: Daemon, tmp_path: Path) -> None:
    daemon.core.gate_load.clear()
    for name in ("a", "b"):
        await daemon.json("POST", "/v1/models", {"name": name, "path": str(tmp_path / "tiny"), "format": "fp16"})
    entry = next(entry for entry in daemon.server.parts.registry.entries() if entry.name == "a")
    await eventually(lambda: entry.progress.stage == "converting")
    info = (await daemon.json("GET", "/v1/models/a"))[1]
    assert info["progress"]["layers_total"] == 2 and info["progress"]["bytes_total"] == 288 << 10
    assert (await daemon.json("GET", "/v1/models/b"))[1]["progress"]["stage"] == "waiting", "one at a time"
    connection, answer, _ = await daemon.attach({"model": "a", "max_tokens": 1})
    assert answer["error"]["code"] == "model_not_ready" and "layer 0 of 2" in answer["error"]["message"]
    connection.close()
    cancelling = asyncio.create_task(daemon.json("DELETE", "/v1/models/a"))
    await daemon.until("a", "unloading")
    assert (await daemon.json("POST", "/v1/models", {"name": "a", "path": str(tmp_path / "tiny")}))[0] == 409
    daemon.core.gate_load.set()
    assert (await cancelling)[1]["state"] == "unloaded"
    await daemon.until("a", "gone")
    await daemon.until("b", "ready")
    assert len(daemon.core.runtime.models) == 2, "the cancelled pool is given back"


async def test_a_model_in_use_is_unloaded_only_by_force(daemon: Daemon) -> None:
    connection, _, _ = await daemon.attach({"model": "tiny", "max_tokens": 4})
    status, answer = await daemon.json("DELETE", "/v1/models/tiny")
    assert status == 409 and answer["error"]["code"] == "model_in_use" and "1 sessions" in answer["error"]["message"]
    assert (await daemon.json("DELETE", "/v1/models/tiny?force=1"))[1]["state"] == "unloaded"
    assert await asyncio.to_thread(connection.recv, 10) == b"", "the lease is over"
    assert (await daemon.json("GET", "/v1/models/tiny"))[1]["state"] == "configured"
    assert not daemon.core.runtime.models and not daemon.core.runtime.sessions
    connection.close()


async def test_ending_a_session(daemon: Daemon) -> None:
    connection, answer, _ = await daemon.attach({"model": "tiny", "max_tokens": 4})
    ring = daemon.core.runtime.sessions[answer["session_id"]][1]
    assert (await daemon.json("DELETE", f"/v1/sessions/{answer['session_id']}"))[0] == 200
    assert ring[CLOSING_OFFSET] == Closing.KICKED, "its ring says why"
    last = json.loads(await asyncio.to_thread(connection.recv, 4096))["error"]
    assert last["code"] == "session_ended" and f"ended over the control API by uid {os.getuid()}" in last["message"]
    assert await asyncio.to_thread(connection.recv, 10) == b""
    connection.close()


async def test_a_data_plane_that_stands_still_does_not_keep_a_session(daemon: Daemon, monkeypatch: Any) -> None:
    monkeypatch.setattr("syshaxd.sessions.CORE_SECONDS", 0.1)
    connection, answer, _ = await daemon.attach({"model": "tiny", "max_tokens": 4})
    daemon.core.gate_end.clear()
    try:
        assert (await daemon.json("DELETE", f"/v1/sessions/{answer['session_id']}"))[0] == 200
        assert b"session_ended" in await asyncio.to_thread(connection.recv, 4096)
    finally:
        daemon.core.gate_end.set()
    connection.close()


async def test_metrics_can_be_parsed_and_count(daemon: Daemon) -> None:
    first, _, _ = await daemon.attach({"model": "tiny", "max_tokens": 4})

    async def samples() -> dict[str, float]:
        _, headers, body = await daemon.http("GET", "/metrics")
        assert headers["content-type"].startswith("text/plain")
        return {
            sample.name + json.dumps(sample.labels): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    before = await samples()
    assert before['syshax_models{"state": "ready"}'] == 1 and before["syshax_sessions{}"] == 1
    assert before['syshax_pool_bytes{"node": "0"}'] == 288 << 10
    assert before['syshax_requests_total{"model": "tiny"}'] == 3
    assert before['syshax_compute_seconds_total{"model": "tiny"}'] == pytest.approx(0.009)
    manual = (ROOT / "docs/CONTROL.md").read_text()
    for name in {name.partition("{")[0] for name in before}:
        assert f"`{name}`" in manual, name
    first.close()
    await eventually(lambda: len(daemon.server.parts.sessions) == 0)
    after = await samples()
    assert after['syshax_requests_total{"model": "tiny"}'] == 3, "counters do not go back when a session ends"
    assert not any(name.startswith("syshax_kernel_not_best") for name in after)


async def test_a_kernel_below_the_best_is_a_warning_and_a_metric(start: Callable[..., Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    daemon = await start(f'[compute]\nisa = "avx2"\n[models.m]\npath = "{tmp_path / "m"}"\nautoload = true\n')
    await daemon.until("m", "ready")
    status = await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)
    assert (status.isa, status.isa_best) == ("avx2", "avx512")
    assert any("capped at avx2" in warning for warning in status.warnings)
    assert any("bf16_f32_avx512 would be better" in warning for warning in status.warnings)
    assert b'syshax_kernel_not_best{best="bf16_f32_avx512"' in (await daemon.http("GET", "/metrics"))[2]
    checks = (await daemon.json("GET", "/v1/doctor"))[1]["checks"]
    assert {check["name"]: check["level"] for check in checks}["instruction set"] == "warning"


async def test_cpus_that_went_away_are_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken offline, or out of the control group's set, while the daemon runs."""
    monkeypatch.setattr("syshaxd.planner.os.sched_getaffinity", lambda pid: {4095})
    status: StatusAnswer = await daemon.ask(daemon.control.get, "/v1/status", StatusAnswer)
    assert any("offline or closed" in warning and "systemctl restart" in warning for warning in status.warnings)
    checks = {check["name"]: check for check in (await daemon.json("GET", "/v1/doctor"))[1]["checks"]}
    assert checks["affinity"]["level"] == "error" and "since it started" in checks["affinity"]["message"]


async def test_doctor_looks_at_everything_and_survives_a_failing_check(daemon: Daemon, monkeypatch: Any) -> None:
    checks = {check["name"]: check for check in (await daemon.json("GET", "/v1/doctor"))[1]["checks"]}
    wanted = {"data plane", "instruction set", "affinity", "CPU quota", "huge pages", "kernel", "shared memory"}
    assert wanted | {"memory of node 0", "model tiny", "access", "sessions", "configuration"} <= set(checks)
    daemon.core.heartbeat_age_ns = 60 * 10**9

    def broken() -> None:
        raise OSError("no quota here")

    monkeypatch.setattr("syshaxd.doctor.cpu_quota", broken)
    answer = (await daemon.json("GET", "/v1/doctor"))[1]
    checks = {check["name"]: check for check in answer["checks"]}
    assert checks["data plane"]["level"] == "error" and "60 s" in checks["data plane"]["message"]
    assert "no quota here" in checks["cpus"]["message"] and "sessions" in checks
    assert all(check["cost"] and check["hint"] for check in checks.values() if not check["ok"])
    assert answer["versions"]["ring"] == answer["versions"]["protocol"] == "1"


async def test_config_set_show_and_reload(daemon: Daemon, tmp_path: Path) -> None:
    status, answer = await daemon.json(
        "PATCH", "/v1/config", {"values": {"limits.sessions": 5, "compute.spin_us": 1, "limits.slots": 16}}
    )
    assert status == 200 and answer["applied"] == ["limits.sessions"]
    assert answer["needs_restart"] == ["compute.spin_us"] and answer["unchanged"] == ["limits.slots"]
    config = (await daemon.json("GET", "/v1/config"))[1]
    assert config["effective"]["limits"]["sessions"] == 5 and config["effective"]["compute"]["spin_us"] == 1000
    assert config["sources"]["limits.sessions"] == "state" and config["needs_restart"] == ["compute.spin_us"]
    status, answer = await daemon.json("PATCH", "/v1/config", {"values": {"limits.sesions": 5}})
    assert status == 400 and "limits.sessions" in answer["error"]["hint"]
    write_checkpoint(tmp_path / "new")
    daemon.config_file.write_text(f'[models.new]\npath = "{tmp_path / "new"}"\nautoload = true\n')
    status, answer = await daemon.json("POST", "/v1/config/reload")
    assert status == 200 and "models.new.path" in answer["applied"]
    await daemon.until("new", "ready")
    assert (await daemon.json("GET", "/v1/models/tiny"))[1]["state"] == "ready", "what is loaded stays"
    daemon.config_file.write_text("[limits\n")
    assert (await daemon.json("POST", "/v1/config/reload"))[0] == 400


async def test_rights_of_members_and_administrators(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "tiny")
    daemon = await start(f'[models.tiny]\npath = "{tmp_path / "tiny"}"\n')
    monkeypatch.setattr("syshaxd.control.routes._peer", lambda request: Peer(1, 12345, 12345, frozenset({12345})))
    for request in (
        {"name": "tiny"},
        {"name": "tiny", "path": str(tmp_path / "tiny")},
        {"name": "tiny", "format": "bf16"},
    ):
        assert (await daemon.json("POST", "/v1/models", request))[0] == 202
    await daemon.until("tiny", "ready")
    refused = [
        ("POST", "/v1/models", {"name": "other", "path": str(tmp_path / "tiny")}),
        ("POST", "/v1/models", {"name": "tiny", "format": "q4_0"}),
        ("DELETE", "/v1/models/tiny", None),
        ("PATCH", "/v1/config", {"values": {"limits.sessions": 5}}),
        ("POST", "/v1/config/reload", None),
    ]
    connection, answer, _ = await daemon.attach({"model": "tiny", "max_tokens": 4})
    refused.append(("DELETE", f"/v1/sessions/{answer['session_id']}", None))
    for method, path, body in refused:
        status, answer = await daemon.json(method, path, body)
        assert status == 403 and answer["error"]["code"] == "not_allowed", path
        assert "syshax-admin" in answer["error"]["hint"]
    connection.close()


async def test_formats_that_are_not_allowed(start: Callable[..., Any], tmp_path: Path) -> None:
    daemon = await start('[precision]\ndefault_format = "q8_0"\nallowed_formats = ["q8_0"]\n')
    status, answer = await daemon.json("POST", "/v1/models", {"name": "m", "path": str(tmp_path), "format": "bf16"})
    assert status == 400 and "allowed: q8_0" in answer["error"]["hint"]


def test_who_is_an_administrator(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    class Group:
        gr_gid = 77

    monkeypatch.setattr(grp, "getgrnam", lambda name: Group() if name == "syshax-admin" else {}[name])
    system, own = Rights(lambda: "syshax-admin", None), Rights(lambda: "syshax-admin", 1000)
    assert system.is_administrator(Peer(1, 0, 0, frozenset()))
    assert system.is_administrator(Peer(1, 1000, 5, frozenset({5, 77})))
    assert not system.is_administrator(Peer(1, 1000, 5, frozenset({5})))
    assert own.is_administrator(Peer(1, 1000, 5, frozenset()))
    assert not own.is_administrator(Peer(1, 1001, 5, frozenset()))
    with pytest.raises(NotAllowedError, match="uid 1001"):
        own.require_administrator(Peer(1, 1001, 5, frozenset()), "load")


def test_the_kernel_names_the_peer() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        peer = peer_of(left)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert set(os.getgroups()) | {os.getgid()} == set(peer.groups)


async def test_the_client_gets_errors_as_classes(daemon: Daemon) -> None:
    with pytest.raises(UnknownModelError, match="nobody"):
        await daemon.ask(daemon.control.get, "/v1/models/nobody", ModelInfo)
    info = await daemon.ask(daemon.control.post, "/v1/models", LoadRequest(name="tiny"), ModelInfo)
    assert info.state == "ready"


def test_the_manual_lists_every_route_and_error() -> None:
    text = (ROOT / "docs/CONTROL.md").read_text()
    for route in ROUTES:
        assert f"`{route}`" in text, route
    for code, error in ERRORS.items():
        assert f"| `{code}` | {error.http_status} | {error.exit_code} |" in text, code


def test_the_fake_core_computes() -> None:
    import numpy as np
    from fake_core import FakeModel

    model = FakeModel("m", {"num_layers": 1}, "bf16", [1], FakeCore())
    eye = np.eye(4, dtype=np.float32)
    model.load_layer(0, [eye], [eye], [eye], "float32")
    x = np.array([[0.0, 1.0, -1.0, 2.0]], np.float32)
    y = model.forward(0, x, np.array([[0, -1]]), np.array([[0.5, 9.0]]), "float32")
    np.testing.assert_allclose(y, 0.5 * x * x / (1 + np.exp(-x)), rtol=1e-6)
