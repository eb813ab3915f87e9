"""The worker's settings: two sources, one order, and refusals that name the nearest key."""

from __future__ import annotations

import pytest

from syshax.endings import ending
from syshax.errors import ConfigError
from syshax.protocol import Closing
from syshax.vllm.launcher import own_settings, split_words
from syshax.vllm.prepare import GONE
from syshax.vllm.settings import PREFIX, WorkerSettings, environment_of, settings_from


def test_defaults() -> None:
    assert settings_from({}, {}) == WorkerSettings()


def test_additional_config_wins_over_environment() -> None:
    environment = {"SYSHAX_RUNTIME_DIR": "/a", PREFIX + "MODEL": "from-env", PREFIX + "RECONNECT_S": "2.5"}
    made = settings_from({"syshax": {"model": "from-config"}, "other": 1}, environment)
    assert (made.runtime_dir, made.model, made.reconnect_s) == ("/a", "from-config", 2.5)


@pytest.mark.parametrize(
    ("section", "environment", "nearest", "where"),
    [
        ({"modle": "x"}, {}, "model", "syshax.modle"),
        ({"runtime-dir": "x"}, {}, "runtime_dir", "syshax.runtime-dir"),
        ({}, {PREFIX + "RECONECT_S": "1"}, "reconnect_s", "$SYSHAX_WORKER_RECONECT_S"),
        ({}, {PREFIX + "Q": "1"}, "", "$SYSHAX_WORKER_Q"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    section: dict[str, str], environment: dict[str, str], nearest: str, where: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_from({"syshax": section}, environment)
    assert where in refused.value.message
    assert nearest in refused.value.hint


@pytest.mark.parametrize(
    "section",
    [
        {"reconnect_s": -1},
        {"request_timeout_s": 0},
        {"format": "q 5"},
        {"model": "../x"},
        {"reconnect_s": "soon"},
        "model=x",
        ["model"],
    ],
)
def test_a_wrong_value_is_refused(section: object) -> None:
    with pytest.raises(ConfigError):
        settings_from({"syshax": section}, {})


def test_other_variables_of_syshax_are_left_alone() -> None:
    assert settings_from({}, {"SYSHAX_ISA": "avx2", "SYSHAX_BUILD_DIR": "x"}) == WorkerSettings()


@pytest.mark.parametrize(
    "settings",
    [
        WorkerSettings(),
        WorkerSettings(runtime_dir="/x y", model="qwen3", format="q4_0", priority="batch"),
        WorkerSettings(request_timeout_s=1.5, reconnect_s=0, load_timeout_s=1e6),
    ],
)
def test_the_environment_carries_settings_whole(settings: WorkerSettings) -> None:
    assert settings_from({}, environment_of(settings)) == settings


@pytest.mark.parametrize("priority", ["interactive", "normal", "batch"])
def test_a_workers_class_comes_from_any_source_and_reaches_its_processes(
    priority: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, _, words = split_words(["/m", "--syshax-priority", priority, "--port", "8001"])
    chosen = own_settings(arguments, words)
    assert chosen.priority == priority and words == ["--port", "8001"]
    assert settings_from({}, environment_of(chosen)).priority == priority
    monkeypatch.setenv(PREFIX + "PRIORITY", priority)
    assert own_settings(*split_words(["/m"])[::2]).priority == priority
    arguments, _, words = split_words(["/m", "--additional-config", f'{{"syshax": {{"priority": "{priority}"}}}}'])
    assert own_settings(arguments, words).priority == priority


def test_a_class_that_does_not_exist_is_refused_before_anything_starts() -> None:
    arguments, _, words = split_words(["/m", "--syshax-priority", "urgent"])
    with pytest.raises(ConfigError, match="setting priority of the syshax worker is 'urgent'"):
        own_settings(arguments, words)


def test_a_worker_waits_for_a_daemon_that_went_away_not_for_one_that_ended_its_session() -> None:
    waited_for = {closing: issubclass(type(ending(closing)), GONE) for closing in Closing}
    assert [closing.name for closing, waits in waited_for.items() if waits] == ["OPEN", "DRAINING", "STOPPED"]
