"""The worker's settings: two sources, one order, and refusals that name the nearest key."""

from __future__ import annotations

import pytest

from syshax.errors import ConfigError
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
