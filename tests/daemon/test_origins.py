"""`config show --origin`: every value's file and line, drop-in, state file, variable or default."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from conftest import Daemon
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import ConfigError
from syshax.protocol import Origin
from syshaxd.__main__ import options_from
from syshaxd.config_files import ConfigFiles
from syshaxd.live_config import LiveConfig
from syshaxd.origins import key_lines
from syshaxd.settings import flatten

LEAVES = st.one_of(
    st.booleans(), st.integers(-9, 9), st.text("ab\n\"'[]=#\\ ", max_size=6), st.lists(st.integers(0, 9), max_size=3)
)
TABLES = st.dictionaries(st.text("abc", min_size=1, max_size=3), LEAVES, max_size=4)


@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), TABLES, max_size=3), st.booleans())
def test_the_line_is_where_the_assignment_is(tables: dict[str, Any], multiline: bool) -> None:
    """Cutting the document before that line loses the key."""
    text = tomli_w.dumps(tables, multiline_strings=multiline)
    lines = text.splitlines(keepends=True)
    found = key_lines(text)
    assert set(found) == {key for key, value in flatten(tables) if value != {}}
    for key, line in found.items():
        assert lines[line - 1].startswith(f"{key.rpartition('.')[2]} ")
        before = dict(flatten(tomllib.loads("".join(lines[: line - 1]))))
        assert key not in before


def test_lines_of_what_people_write() -> None:
    text = '# c\n\n[a]  # [b]\nx = [\n  1,\n\n  2]\n"y.z" = """\n[k]\nw = 1\n"""\nt = {u = 1, v = 2}\n[d.e]\nf.g = 1\n'
    assert key_lines(text) == {"a.x": 4, "a.y.z": 8, "a.t.u": 12, "a.t.v": 12, "d.e.f.g": 14}


def shown(files: ConfigFiles) -> tuple[LiveConfig, dict[str, Origin]]:
    live = LiveConfig(files, files.load(), lambda config: None)
    return live, live.answer("b").origins


def test_each_kind_of_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, drop_in = tmp_path / "syshaxd.toml", tmp_path / "syshaxd.toml.d" / "10-a.toml"
    main.write_text("# first\n[limits]\nsessions = 3\nslots = 4\n[models.m]\npath = '/m'\n")
    drop_in.parent.mkdir()
    drop_in.write_text("[limits]\n\nslots = 5\n")
    files = ConfigFiles(main, False, tmp_path / "state")
    files.save_overrides({"limits.drain_seconds": 7})
    monkeypatch.setenv("SYSHAX_ISA", "avx2")
    live, origins = shown(files)
    assert origins["limits.sessions"] == Origin(kind="file", where=str(main), line=3)
    assert origins["limits.slots"] == Origin(kind="drop-in", where=str(drop_in), line=3)
    assert origins["models.m.path"] == Origin(kind="file", where=str(main), line=6)
    state = str(tmp_path / "state" / "overrides.toml")
    assert origins["limits.drain_seconds"] == Origin(kind="state", where=state, line=3)
    assert origins["compute.isa"] == Origin(kind="environment", where="SYSHAX_ISA")
    assert live.current().compute.isa == "avx2", "the variable wins"
    assert origins["models.m.autoload"] == origins["memory.limit"] == Origin(kind="default")
    assert set(origins) == set(dict(flatten(live.answer("b").effective))), "every key is there"


def test_the_origin_is_that_of_the_value_in_force(tmp_path: Path) -> None:
    main = tmp_path / "syshaxd.toml"
    main.write_text("[compute]\nspin_us = 3\n[limits]\nslots = 4\n")
    live, _ = shown(ConfigFiles(main, True, tmp_path / "state"))
    main.write_text("[limits]\nslots = 5\n\n[compute]\n\nspin_us = 4\n")
    live.reload("b")
    answer = live.answer("b")
    assert answer.effective["compute"]["spin_us"] == 3 and answer.origins["compute.spin_us"].line == 2
    assert answer.effective["limits"]["slots"] == 5 and answer.origins["limits.slots"].line == 2
    assert answer.needs_restart == ["compute.spin_us"]


def test_a_wrong_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYSHAX_ISA", "AVX-2")
    with pytest.raises(ConfigError, match=r"environment SYSHAX_ISA: compute\.isa"):
        ConfigFiles(tmp_path / "absent").load()
    monkeypatch.setenv("SYSHAX_ISA", "")
    assert ConfigFiles(tmp_path / "absent").load().config.compute.isa == ""


def test_what_the_daemon_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYSHAX_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    start = {option.name: option for option in options_from(Path("/c"), tmp_path, None, False).start}
    assert start["--config"].origin.kind == "command line" and start["--config"].value == "/c"
    assert start["--runtime-dir"].origin == Origin(kind="environment", where="SYSHAX_RUNTIME_DIR")
    assert start["--state-dir"].origin.kind == "default"


async def test_over_the_control_api(daemon: Daemon) -> None:
    config = (await daemon.json("GET", "/v1/config"))[1]
    assert config["origins"]["models.tiny.autoload"] == {"kind": "file", "where": str(daemon.config_file), "line": 3}
