"""What verbs send, how they end, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ctl_fixtures import BOOT, GIB, LOADING, READY, FakeControl, RunCtl, session
from hypothesis import given
from hypothesis import strategies as st

from syshax import errors
from syshax.ctl import values, waiting
from syshax.front import WorkerChangeAnswer, WorkerInfo, WorkersAnswer
from syshax.protocol import ModelInfo, ModelState, Progress, RestartAnswer, SessionInfo, SessionsAnswer

DOCS = Path(__file__).parents[2] / "docs" / "SYSHAXCTL.md"


@pytest.mark.parametrize("error", sorted(errors.ERRORS.values(), key=lambda cls: cls.code), ids=lambda cls: cls.code)
@pytest.mark.parametrize("verb", ["status", "load /models/x", "unload x", "config set a=1"])
def test_every_error_has_its_exit_status_message_and_hint(
    ctl: RunCtl, control: FakeControl, error: type[errors.SyshaxError], verb: str
) -> None:
    routes = {
        "status": "GET /v1/status",
        "load /models/x": "POST /v1/models",
        "unload x": "DELETE /v1/models/x",
        "config set a=1": "PATCH /v1/config",
    }
    control.replies[routes[verb]] = error("it went wrong at 3 of 4", "do this")
    for arguments in (verb.split(), ["--json", *verb.split()]):
        ran = ctl(*arguments)
        assert ran.status == error.exit_code
        assert ran.err == "error: it went wrong at 3 of 4\nhint: do this\n" and ran.out == ""


def test_exit_statuses_are_documented() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE))
    for error in errors.ERRORS.values():
        assert f"`{error.code}`" in rows[str(error.exit_code)], error
    assert "130" in rows


def test_verbs_are_documented() -> None:
    text = DOCS.read_text()
    for verb in ("status", "models", "load", "unload", "sessions", "topology", "kernels", "doctor"):
        assert f"`{verb}" in text
    for verb in ("config show", "config set", "config reload", "sessions set", "sessions kick"):
        assert f"`{verb}" in text


def test_no_daemon(ctl: RunCtl, tmp_path: Path) -> None:
    ran = ctl("status", runtime_dir=tmp_path / "nowhere")
    assert ran.status == 3 and ran.err.startswith("error: no syshaxd at") and "\nhint: " in ran.err and not ran.out


def test_the_runtime_directory_comes_from_the_environment(
    control: FakeControl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from syshax.ctl.__main__ import main

    monkeypatch.setenv("SYSHAX_RUNTIME_DIR", str(control.folder))
    monkeypatch.setattr("sys.argv", ["syshaxctl", "models"])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code and "mixtral" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--jsn"], ["status", "--nope"], ["frob"], ["unload"], ["config", "set"], ["config", "frob"], []]
)
def test_wrong_usage_exits_2(ctl: RunCtl, arguments: list[str]) -> None:
    ran = ctl(*arguments)
    assert ran.status == 2 and "Usage: syshaxctl" in ran.out + ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load"], "neither PATH nor --name"),
        (["load", "/m", "--format", "q 5"], "format 'q 5'"),
        (["load", "/m", "--name", "a b"], "name 'a b'"),
        (["load", "/"], "gives no name"),
        (["config", "set", "log.level"], "'log.level' is not KEY=VALUE"),
        (["config", "set", "a b=1"], "'a b=1' is not KEY=VALUE"),
        (["config", "set", "a=1", "a=2"], "a is given twice"),
    ],
)
def test_wrong_values_exit_2_before_anything_is_sent(
    ctl: RunCtl, control: FakeControl, arguments: list[str], message: str
) -> None:
    ran = ctl(*arguments)
    assert ran.status == 2 and ran.err.startswith("error: ") and message in ran.err
    assert not control.asked


def test_load_sends_an_absolute_path_and_the_directorys_name(
    ctl: RunCtl, control: FakeControl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = ctl("load", "some/Qwen3 30B", "--format", "q4_0")
    sent = {"name": "Qwen3-30B", "path": f"{tmp_path}/some/Qwen3 30B", "format": "q4_0"}
    assert control.asked == [("POST /v1/models", sent)]
    assert ran.status == 0 and "mixtral is loading; follow it with: syshaxctl load --name mixtral --wait" in ran.out
    ctl("load", "--name", "configured")
    assert control.asked[-1] == ("POST /v1/models", {"name": "configured"})
    ran = ctl("load", "/m", "--json")
    assert ModelInfo.model_validate_json(ran.out) == LOADING


def test_a_path_that_was_meant_as_a_name(
    ctl: RunCtl, control: FakeControl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    control.replies["POST /v1/models"] = errors.CheckpointError("there is no directory qwen3", "check it")
    assert (
        "hint: a model named in the configuration is loaded with: syshaxctl load --name qwen3"
        in ctl("load", "qwen3").err
    )
    assert "hint: check it" in ctl("load", "/abs/qwen3").err


def loading_for(control: FakeControl, steps: int, last: Any) -> None:
    seen = 0

    def next_state() -> Any:
        nonlocal seen
        seen += 1
        if seen > steps:
            return last
        done = Progress(stage="converting", bytes_done=seen * GIB, bytes_total=(steps + 1) * GIB, seconds=seen / 4)
        return LOADING.model_copy(update={"progress": done})

    control.replies["GET /v1/models/mixtral"] = next_state


def test_load_waits_until_ready(ctl: RunCtl, control: FakeControl) -> None:
    loading_for(control, 3, READY.model_copy(update={"name": "mixtral"}))
    ran = ctl("load", "/m/mixtral", "--wait")
    assert ran.status == 0 and ran.out.startswith("mixtral is ready: q8_0_f32_avx512 for float32")
    assert ran.err.startswith("loading mixtral: converting"), "without a terminal: a line, on stderr"
    loading_for(control, 1, READY.model_copy(update={"name": "mixtral"}))
    ran = ctl("--json", "load", "/m/mixtral", "--wait")
    assert ModelInfo.model_validate_json(ran.out).state is ModelState.READY


@pytest.mark.parametrize(
    ("last", "status", "message"),
    [
        (
            LOADING.model_copy(update={"state": ModelState.FAILED, "reason": "tensor x is short"}),
            6,
            "tensor x is short",
        ),
        (LOADING.model_copy(update={"state": ModelState.UNLOADING}), 6, "was cancelled"),
        (errors.UnknownModelError("no model mixtral"), 6, "was cancelled"),
        (errors.ShuttingDownError("syshaxd is stopping"), 3, "syshaxd is stopping"),
    ],
)
def test_load_says_how_a_wait_ended(ctl: RunCtl, control: FakeControl, last: Any, status: int, message: str) -> None:
    loading_for(control, 1, last)
    ran = ctl("load", "/m/mixtral", "--wait")
    assert ran.status == status and message in ran.err and not ran.out


def test_unload(ctl: RunCtl, control: FakeControl) -> None:
    assert ctl("unload", "mixtral").out == "mixtral: unloaded\n"
    ctl("unload", "mixtral", "--force")
    ctl("unload", "a/../b?c", "--force")
    assert [route for route, _ in control.asked] == [
        "DELETE /v1/models/mixtral",
        "DELETE /v1/models/mixtral?force=1",
        "DELETE /v1/models/a%2F..%2Fb%3Fc?force=1",
    ]


def test_sessions_set(ctl: RunCtl, control: FakeControl) -> None:
    control.replies["PATCH /v1/sessions/3"] = session(3, priority="batch", share=50)
    ran = ctl("sessions", "set", "3", "--priority", "batch", "--share", "50")
    assert ran.out == "session 3 (vllm-worker 3): batch, at most 50 % of the data plane's time\n"
    control.replies["PATCH /v1/sessions/3"] = session(3, client="", priority="batch", share=100)
    assert ctl("sessions", "set", "3", "--share", "100").out == (
        "session 3 (Qwen3-30B-A3B): batch, no limit to its share\n"
    )
    assert [body for _, body in control.asked] == [{"priority": "batch", "share": 50}, {"share": 100}]
    ran = ctl("--json", "sessions", "set", "3", "--priority", "normal")
    assert SessionInfo.model_validate_json(ran.out).session_id == 3
    asked = len(control.asked)
    for words, status, message in (
        (["3"], 2, "neither --priority nor --share"),
        (["3", "--priority", "urgent"], 2, "priority 'urgent'"),
        (["3", "--share", "0"], 2, "share 0"),
        (["three", "--share", "5"], 2, "'ID'"),
    ):
        ran = ctl("sessions", "set", *words)
        assert ran.status == status and message in ran.err and "Traceback" not in ran.err
    assert len(control.asked) == asked, "nothing is asked that makes no sense"


def test_sessions_kick(ctl: RunCtl, control: FakeControl) -> None:
    control.replies["DELETE /v1/sessions/3"] = SessionsAnswer(boot_id="b", sessions=[])
    assert ctl("sessions", "kick", "3").out == "session 3 was ended\n"
    control.replies["DELETE /v1/sessions/4"] = errors.NotAllowedError(
        "only administrators may end other users' sessions"
    )
    ran = ctl("sessions", "kick", "4")
    assert ran.status == 4 and "only administrators" in ran.err
    assert [route for route, _ in control.asked] == ["DELETE /v1/sessions/3", "DELETE /v1/sessions/4"]
    assert ctl("sessions", "kick").status == 2


def test_config_set(ctl: RunCtl, control: FakeControl) -> None:
    ran = ctl(
        "config", "set", "log.level=debug", "limits.sessions=8", "compute.nodes=[1, 0]", "x.y=", 'z="1"', "w=true"
    )
    given = {
        "log.level": "debug",
        "limits.sessions": 8,
        "compute.nodes": [1, 0],
        "x.y": None,
        "z": "1",
        "w": True,
    }
    assert control.asked == [("PATCH /v1/config", {"values": given})]
    assert "applied:         log.level" in ran.out and "needs a restart: compute.threads" in ran.out
    ctl("config", "set", "log.level", "debug")
    assert control.asked[-1][1] == {"values": {"log.level": "debug"}}


def test_an_answer_that_is_no_answer(ctl: RunCtl, control: FakeControl) -> None:
    control.replies["GET /v1/status"] = b"<html>"
    ran = ctl("status")
    assert ran.status == 3 and "StatusAnswer" in ran.err and "Traceback" not in ran.err


@given(st.text(max_size=200))
def test_any_word_is_a_value(text: str) -> None:
    parsed = values.toml_or_text(text)
    assert isinstance(parsed, bool | int | float | str | list)


@given(st.integers(), st.booleans(), st.text(st.characters(categories=("L",)), min_size=1))
def test_toml_values_keep_their_type(number: int, truth: bool, word: str) -> None:
    assert values.toml_or_text(str(truth).lower()) is truth
    if abs(number) < 1 << 63:
        assert values.toml_or_text(str(number)) == number
    if word not in ("true", "false", "inf", "nan"):
        assert values.toml_or_text(word) == word


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/m/Qwen3-30B-A3B/", "Qwen3-30B-A3B"),
        ("/hub/models--Qwen--Qwen3-30B-A3B/snapshots/ad44e7", "Qwen3-30B-A3B"),
        ("/m/.hidden model!", "hidden-model-"),
        ("/m/" + "x" * 200, "x" * 128),
    ],
)
def test_default_names(path: str, name: str) -> None:
    assert values.default_name(Path(path)) == name


def run_on_a_terminal(control: FakeControl, *arguments: str, interrupt_at: str = "") -> tuple[int, str]:
    """Runs syshaxctl on a pseudo-terminal of 80 columns: exit status and all it wrote."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "SYSHAX_RUNTIME_DIR": str(control.folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "syshax.ctl", *arguments], stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    text, deadline = "", time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            if not select.select([parent], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(parent, 4096)
            except OSError:
                break
            text += data.decode("utf-8", "replace")
            if interrupt_at and interrupt_at in text:
                process.send_signal(signal.SIGINT)
                interrupt_at = ""
        return process.wait(10), text
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def test_a_terminal_shows_a_bar_and_colours(control: FakeControl) -> None:
    loading_for(control, 4, READY.model_copy(update={"name": "mixtral"}))
    status, text = run_on_a_terminal(control, "load", "/m/mixtral", "--wait")
    assert status == 0 and "converting mixtral" in text and "━" in text and "GiB of 5.00 GiB" in text
    assert "mixtral is ready" in text
    _, text = run_on_a_terminal(control, "models")
    assert "\x1b[32mready" in text


def test_interrupting_a_wait_says_how_to_go_on(control: FakeControl) -> None:
    status, text = run_on_a_terminal(control, "load", "/m/mixtral", "--wait", interrupt_at="converting")
    assert status == 130 and "goes on in the daemon" in text and "syshaxctl unload mixtral" in text
    assert "Traceback" not in text


def test_a_closed_pipe_is_no_traceback(control: FakeControl) -> None:
    command = f'"{sys.executable}" -m syshax.ctl --runtime-dir "{control.folder}" status --json | head -c 1'
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert ran.stdout == "{" and "Traceback" not in ran.stderr


def test_restart_waits_for_the_next_daemon(ctl: RunCtl, control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "RESTART_POLL_SECONDS", 0.0)
    old = control.replies["GET /v1/status"]
    new = old.model_copy(update={"boot_id": "another", "pid": 77})
    answers = iter([old, errors.ShuttingDownError("it drains"), old, new])
    control.replies["POST /v1/restart"] = RestartAnswer(boot_id=old.boot_id, pid=old.pid)
    control.replies["GET /v1/status"] = lambda: next(answers)
    ran = ctl("restart", "--drain")
    assert ran.status == 0 and "serves again (pid 77): 0 models were kept" in ran.out
    assert control.asked[0] == ("POST /v1/restart", {"drain": True}) and len(control.asked) == 5


def test_a_restart_after_which_nothing_comes_ends_in_words(
    ctl: RunCtl, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "RESTART_SECONDS", 0.0)
    old = control.replies["GET /v1/status"]
    control.replies["POST /v1/restart"] = RestartAnswer(boot_id=old.boot_id, pid=old.pid)
    ran = ctl("restart")
    assert ran.status == 9 and f"the old one (pid {old.pid}) is still there" in ran.err and "journalctl" in ran.err
    assert control.asked[0] == ("POST /v1/restart", {"drain": False})


WORKER = WorkerInfo(url="http://h:1", group="default", state="ready", models=["m"], outstanding=3, requests=70)


def test_workers_are_listed_and_changed(control: FakeControl, ctl: RunCtl) -> None:
    away = WorkerInfo(
        url="unix:/w.sock", group="fast", state="not ready", reason="connection refused", experts="attached"
    )
    hand = WORKER.model_copy(
        update={"url": "http://h:2", "configured": False, "ttft_ms_p50": 41.5, "ttft_ms_p99": 980.2}
    )
    control.replies["GET /v1/workers"] = WorkersAnswer(boot_id=BOOT, processes=2, workers=[WORKER, away, hand])
    changed = WorkerChangeAnswer(
        boot_id=BOOT, url="http://h:2", group="default", message="is added", permanent='workers = ["http://h:2"]'
    )
    for route in ("POST /v1/workers", "PATCH /v1/workers/http%3A%2F%2Fh%3A2", "DELETE /v1/workers/http%3A%2F%2Fh%3A2"):
        control.replies[route] = changed
    front = ["--api-socket", str(control.folder / "control.sock")]
    for words in (["workers"], ["workers", "list"]):
        out = ctl(*words, *front).out
        assert "42 / 980" in out and "unix:/w.sock: connection refused" in out and "experts: not known" in out
        assert "added by hand" in out and all(len(line) <= 80 for line in out.splitlines())
    assert json.loads(ctl("--json", "workers", *front).out)["workers"][0]["outstanding"] == 3
    for verb in (["add", "http://h:2", "--group", "default"], ["drain", "http://h:2"], ["remove", "http://h:2"]):
        out = ctl("workers", *verb, *front, width=120).out
        assert 'its configuration needs: workers = ["http://h:2"]' in out
    assert [body for route, body in control.asked if not route.startswith("GET")] == [
        {"url": "http://h:2", "group": "default"}, {"draining": True}, None,
    ]  # fmt: skip
