"""What people and programs see of every verb."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from ctl_fixtures import BOOT, FAILED, GIB, LOADING, READY, FakeControl, RunCtl, answers, session
from hypothesis import given
from hypothesis import strategies as st

from syshax.ctl import screens, units
from syshax.protocol import (
    CacheAnswer,
    CacheEntry,
    CachePruneAnswer,
    Check,
    DoctorAnswer,
    ModelInfo,
    ModelsAnswer,
    Origin,
    SessionsAnswer,
    StartOption,
    StatusAnswer,
)

VERBS = ["status", "models", "sessions", "topology", "kernels", "config show", "doctor", "config reload"]
STATUS = """\
syshaxd  ready, up 2 h 13 min, version 0.1.0, pid 1234
CPU      Intel(R) Xeon(R) Platinum 8480+, kernels for avx2 (this CPU can do
         avx512)
experts  30.0 GiB of 200 GiB allowed
work     2 sessions, 1.23 M requests, 3 failed, 45.7 M tokens, 1 h 16 min
         computing

Node  CPUs         Threads  Share  Busy   Experts   Huge     Free   Memory
   0  0-15,64-79        16   50 %  83 %  15.0 GiB  100 %  190 GiB  256 GiB
   1  16-31,80-95       16   50 %   7 %  15.0 GiB   33 %  190 GiB  256 GiB

Model          State       Format  Experts              Size  Sessions   Calls
Qwen3-30B-A3B  ready       q8_0    48 x 128, top 8  30.0 GiB         2  1.23 M
mixtral        loading     q4_0    -                       -         0       0
broken         failed      bf16    -                       -         0       0
later          configured  fp16    -                       -         0       0

Qwen3-30B-A3B: q8_0_f32_avx512 for float32, q8_0_int8_avx512 for
               bfloat16/float16
mixtral:       converting, 38 % of 24.0 GiB, layer 12 of 32, 1 min 23 s
broken:        model.layers.3.mlp.experts.7.up_proj.weight has shape [700,
               2048], expected [768, 2048]

warning: SYSHAX_ISA=avx2 keeps kernels below what this CPU can do (avx512):
         expect less than half the speed
"""


def test_status_is_one_screen(ctl: RunCtl) -> None:
    assert ctl("status").out == STATUS
    wide = ctl("status", width=140).out
    assert "(this CPU can do avx512)\n" in wide and "expected [768, 2048]\n" in wide
    assert len(STATUS.splitlines()) <= 25


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("verb", VERBS)
def test_every_screen_fits_and_is_plain_text(ctl: RunCtl, verb: str, width: int) -> None:
    ran = ctl(*verb.split(), width=width)
    assert ran.status == (verb == "doctor") and not ran.err and ran.out.strip()
    assert "\x1b" not in ran.out, "no colour where there is no terminal"
    for line in ran.out.splitlines():
        assert len(line) <= width and line == line.rstrip()


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_the_message(ctl: RunCtl, verb: str) -> None:
    method = "POST" if verb == "config reload" else "GET"
    route = {"config show": "GET /v1/config", "config reload": "POST /v1/config/reload"}.get(
        verb, f"{method} /v1/{verb}"
    )
    message = answers()[route]
    for arguments in (["--json", *verb.split()], [*verb.split(), "--json"]):
        ran = ctl(*arguments)
        if verb == "doctor":
            parsed = json.loads(ran.out)
            assert [parsed["checks"].pop(0)["name"] for _ in range(2)] == ["daemon", "memory lock"]
            assert parsed == json.loads(message.model_dump_json())
        else:
            assert type(message).model_validate_json(ran.out) == message


def test_a_pipe_is_not_folded(ctl: RunCtl, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(*_: object) -> None:
        monkeypatch.delenv("COLUMNS", raising=False)

    monkeypatch.setattr(monkeypatch, "setenv", keep)
    assert FAILED.reason in ctl("models").out


def test_brackets_in_texts_are_texts(ctl: RunCtl, control: FakeControl) -> None:
    broken = FAILED.model_copy(update={"reason": "[red]shape[/red] [700, 2048] :smile:"})
    control.replies["GET /v1/models"] = ModelsAnswer(boot_id=BOOT, models=[broken])
    assert "[red]shape[/red] [700, 2048] :smile:" in ctl("models").out


def test_an_idle_daemon(ctl: RunCtl, control: FakeControl) -> None:
    status = answers()["GET /v1/status"]
    assert isinstance(status, StatusAnswer)
    changes = {
        "models": [],
        "sessions": 1,
        "warnings": [],
        "requests_failed": 0,
        "isa": "avx512",
        "memory_limit_bytes": 0,
        "state": "degraded",
        "reason": "node 1 has no memory",
    }
    control.replies["GET /v1/status"] = status.model_copy(update=changes)
    out = ctl("status").out
    assert "no models: syshaxctl load PATH" in out and "1 session," in out and "allowed" not in out
    assert "degraded, up" in out and "node 1 has no memory" in out and "warning" not in out and "can do" not in out
    control.replies["GET /v1/sessions"] = SessionsAnswer(boot_id=BOOT, sessions=[])
    assert ctl("sessions").out == "no sessions: no worker is attached\n"
    control.replies["GET /v1/models"] = ModelsAnswer(boot_id=BOOT, models=[])
    assert "no models" in ctl("models").out


def test_long_names_stay_whole(ctl: RunCtl, control: FakeControl) -> None:
    name = "a-very-long-name-of-a-model-that-somebody-chose"
    model = READY.model_copy(update={"name": name})
    control.replies["GET /v1/models"] = ModelsAnswer(boot_id=BOOT, models=[model])
    assert name in ctl("models", width=140).out
    sessions = [session(1, model=name, client="vllm", requests=0, queued_ms_total=0, compute_ms_total=0)]
    control.replies["GET /v1/sessions"] = SessionsAnswer(boot_id=BOOT, sessions=sessions)
    out = ctl("sessions", width=140).out
    assert name in out and " - " in out


def test_sessions_name_trouble(ctl: RunCtl, control: FakeControl) -> None:
    out = ctl("sessions").out
    assert "session 2 (pid 4002) is stale" in out and "session 2: 4 calls failed" in out and "its share" not in out
    throttled = session(7, share=50, throttled_ms_total=812_345)
    control.replies["GET /v1/sessions"] = SessionsAnswer(boot_id=BOOT, sessions=[throttled])
    assert "session 7 waited 13 min 32 s for its share of 50 %" in ctl("sessions").out


SESSIONS = """\
ID  Worker (pid), model                  Class               Use   Tokens      Wait ms    Service ms
 1  chat (4001), Qwen3-30B-A3B           interactive        42 %   1.23 M  0.01 / 0.40   0.31 / 1.90
 2  vllm-worker 2 (4194303),             batch        50 of 50 %  999,999  12.3 / 1234  31.0 / 12345
    Qwen3-30B-A3B
 3  a-client-with-a-very-long-name-xxxx  normal       idle 5 min        0            -             -
    xxxx… (4003), Qwen3-30B-A3B

use:           of the data plane's time in the last seconds
wait, service: before a call begins, and from there on: median / 99th percentile since attaching
"""


def test_sessions_are_readable_on_a_hundred_columns(ctl: RunCtl, control: FakeControl) -> None:
    rows = [
        session(1, client="chat", priority="interactive", use=0.42, wait_ms_p50=0.012, wait_ms_p99=0.4,
                service_ms_p50=0.31, service_ms_p99=1.9),
        session(2, pid=4194303, priority="batch", share=50, use=0.5, tokens=999_999, wait_ms_p50=12.3,
                wait_ms_p99=1234.4, service_ms_p50=31, service_ms_p99=12345),
        session(3, client="a-client-with-a-very-long-name-" + "x" * 169, requests=0, tokens=0, in_flight=0,
                last_active_seconds=301),
    ]  # fmt: skip
    control.replies["GET /v1/sessions"] = SessionsAnswer(boot_id=BOOT, sessions=rows)
    assert ctl("sessions", width=100).out == SESSIONS


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("number", [1, 40])
def test_any_number_of_sessions_fits(ctl: RunCtl, control: FakeControl, number: int, width: int) -> None:
    rows = [session(index, use=index / 40, share=1 + index) for index in range(1, number + 1)]
    control.replies["GET /v1/sessions"] = SessionsAnswer(boot_id=BOOT, sessions=rows)
    lines = ctl("sessions", width=width).out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(" normal " in line for line in lines) == number
    if width >= 100:
        assert len(lines) == 1 + number + 3, "one line a session"


def test_a_clients_name_cannot_speak_to_the_terminal(ctl: RunCtl, control: FakeControl) -> None:
    hostile = session(1, client="\x1b[2J\x1b]0;pwned\x07\r\nroot")
    control.replies["GET /v1/sessions"] = SessionsAnswer(boot_id=BOOT, sessions=[hostile])
    out = ctl("sessions", width=140).out
    assert "\x1b" not in out and "\x07" not in out and "?[2J?]0;pwned???root (4001)" in out


def test_config_show_of_a_table(ctl: RunCtl) -> None:
    out = ctl("config", "show", "limits").out
    assert "limits.sessions" in out and "state" in out and "log.level" not in out
    assert "restart needed: compute.threads" in ctl("config", "show").out
    assert "/etc/syshax/syshaxd.toml" in ctl("config", "show", "compute.nodes").out
    ran = ctl("config", "show", "limts")
    assert ran.status == 5 and "'limts'" in ran.err


def test_doctor_says_cost_and_fix_and_its_status_the_worst(ctl: RunCtl, control: FakeControl) -> None:
    ran = ctl("doctor")
    assert ran.status == 1 and "1 warning" in ran.out and "fix: remove SYSHAX_ISA" in ran.out
    bad = Check(name="pool", ok=False, message="node 0 holds 0 bytes", cost="nothing is there", hint="load again")
    control.replies["GET /v1/doctor"] = DoctorAnswer(boot_id=BOOT, checks=[bad])
    ran = ctl("doctor")
    assert ran.status == 2 and "1 error" in ran.out and "costs: nothing is there\n" in ran.out
    assert "fix: load again" in ran.out
    ran = ctl("--json", "doctor")
    assert ran.status == 2 and DoctorAnswer.model_validate_json(ran.out).checks[2:] == [bad]
    control.replies["GET /v1/doctor"] = DoctorAnswer(boot_id=BOOT, checks=[])
    ran = ctl("doctor")
    assert ran.status == 0 and "all is well" in ran.out


def test_doctor_without_a_daemon_looks_at_the_machine(ctl: RunCtl, tmp_path: Path) -> None:
    ran = ctl("doctor", runtime_dir=tmp_path / "nobody")
    assert ran.status == 2 and "no syshaxd at" in ran.out and "kernel" in ran.out and not ran.err
    checks = {
        check["name"]: check for check in json.loads(ctl("doctor", "--json", runtime_dir=tmp_path / "x").out)["checks"]
    }
    assert (
        checks["daemon"]["level"] == "error"
        and checks["daemon"]["cost"]
        and "systemctl start" in checks["daemon"]["hint"]
    )
    assert {"kernel", "control groups", "memory lock", "huge pages", "NUMA balancing", "CPU governor"} <= set(checks)


def test_progress_in_words() -> None:
    assert screens.progress_text(LOADING) == "converting, 38 % of 24.0 GiB, layer 12 of 32, 1 min 23 s"
    bare = ModelInfo.model_validate({**LOADING.model_dump(), "progress": {}})
    assert screens.progress_text(bare) == "starting, 0 s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (GIB - 1, "1.00 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes(value: int, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "0.25 s"),
        (3.14, "3.1 s"),
        (59.9, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (7980, "2 h 13 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@given(st.integers(0, 1 << 59))
def test_a_size_is_within_half_a_percent_and_short(value: int) -> None:
    number, unit = units.size(value).split(" ")
    factor = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40, "PiB": 50}[unit]
    assert math.isclose(float(number) * (1 << factor), value, rel_tol=0.006) and len(number) <= 4


@given(st.integers(0, 10**17))
def test_a_count_is_within_half_a_percent(value: int) -> None:
    number, _, unit = units.count(value).partition(" ")
    factor = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[unit]
    assert math.isclose(float(number.replace(",", "")) * factor, value, rel_tol=0.006)


@given(st.sets(st.integers(0, 300)))
def test_cpu_ranges_name_each_cpu_once(cpus: set[int]) -> None:
    text = units.cpu_ranges(sorted(cpus))
    named: list[int] = []
    for part in [] if text == "-" else text.split(","):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(cpus)


def test_config_show_origin(ctl: RunCtl, control: FakeControl) -> None:
    answer = control.replies["GET /v1/config"]
    origins = {
        "compute.nodes": Origin(kind="file", where="/etc/syshax/syshaxd.toml", line=12),
        "compute.threads": Origin(kind="environment", where="SYSHAX_THREADS"),
        "limits.sessions": Origin(kind="state", where="/var/lib/syshax/overrides.toml", line=3),
        "log.level": Origin(kind="default"),
        "models.later.path": Origin(kind="drop-in", where="/etc/syshax/syshaxd.toml.d/10.toml", line=2),
    }
    start = [StartOption(name="--state-dir", value="/s", origin=Origin(kind="command line"))]
    control.replies["GET /v1/config"] = answer.model_copy(update={"origins": origins, "start": start})
    lines = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in ctl("config", "show", "--origin", width=200).out.splitlines()
        if line
    }
    assert lines["compute.nodes"] == "[0, 1] /etc/syshax/syshaxd.toml:12"
    assert lines["compute.threads"] == "0 variable SYSHAX_THREADS"
    assert lines["limits.sessions"] == "16 config set, /var/lib/syshax/overrides.toml:3"
    assert lines["log.level"] == '"info" default'
    assert lines["models.later.path"].endswith("drop-in /etc/syshax/syshaxd.toml.d/10.toml:2")
    assert lines["--state-dir"] == "/s command line"
    assert "--state-dir" not in ctl("config", "show", "limits", "--origin").out


def test_cache_list_and_prune(ctl: RunCtl, control: FakeControl) -> None:
    entries = [
        CacheEntry(
            key=letter * 32, name=name, path=f"/models/{name}", format="q4_0", fingerprint="f", bytes=15 * GIB,
            used_at=time.time() - 7200, in_use=letter == "b",
            useless="its checkpoint has changed" if letter == "a" else "",
        )
        for letter, name in (("a", "mixtral"), ("b", "qwen3"), ("c", "olmoe"))
    ]  # fmt: skip
    control.replies["GET /v1/cache"] = CacheAnswer(
        boot_id=BOOT, enabled=True, directory="/var/cache/syshax", bytes=45 * GIB, limit_bytes=100 * GIB,
        free_bytes=200 * GIB, entries=entries,
    )  # fmt: skip
    out = ctl("cache", "list", width=100).out
    lines = [line.split() for line in out.splitlines()]
    assert "/var/cache/syshax: 45.0 GiB of 100 GiB, 200 GiB free" in out
    states = {words[0]: words[-1] for words in lines if words and words[0] in {entry.key for entry in entries}}
    assert states == {"a" * 32: "useless", "b" * 32: "use", "c" * 32: "ready"} and "2 h ago" in out
    assert f"{'a' * 32}: its checkpoint has changed" in out
    answer = CachePruneAnswer(boot_id=BOOT, removed=["a" * 32], kept=["b" * 32], bytes=15 * GIB)
    control.replies["POST /v1/cache/prune"] = answer
    out = ctl("cache", "prune", "a" * 32, "b" * 32).out
    assert f"removed: {'a' * 32}" in out and f"in use:  {'b' * 32}" in out and "freed:   15.0 GiB" in out
    assert control.asked[-1] == ("POST /v1/cache/prune", {"keys": ["a" * 32, "b" * 32], "all": False})
    assert CachePruneAnswer.model_validate_json(ctl("cache", "prune", "--all", "--json").out) == answer
    assert control.asked[-1][1] == {"keys": [], "all": True}
    assert ctl("cache", "prune", "--all", "a" * 32).status == 2
    assert ctl("cache", "prune", "nonsense").status == 2
    control.replies["GET /v1/cache"] = CacheAnswer(boot_id=BOOT, enabled=False)
    assert ctl("cache", "list").out == "this daemon has no packed cache\n"
