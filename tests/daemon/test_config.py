"""syshaxd's configuration: families of mistakes, live keys, the state file, and documents that match the schema."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syshax.errors import ConfigError
from syshaxd import config_docs
from syshaxd.config import Config, is_live, live_keys
from syshaxd.config_files import ConfigFiles, split_key, unflatten
from syshaxd.live_config import LiveConfig
from syshaxd.quantities import disk_share, format_cpus, format_size, parse_cpus, parse_disk_share, parse_size
from syshaxd.settings import Layer, build, flatten

ROOT = Path(__file__).resolve().parents[2]
KEYS = [key.replace("NAME", "tiny") for key, _, _ in live_keys()]


@pytest.fixture(autouse=True)
def no_variable_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps tests' daemons away from the user's cache."""
    monkeypatch.delenv("SYSHAX_CACHE_ENABLED")


def files_of(folder: Path, text: str, **drop_ins: str) -> ConfigFiles:
    main = folder / "syshaxd.toml"
    main.write_text(text)
    (folder / "syshaxd.toml.d").mkdir(exist_ok=True)
    for name, content in drop_ins.items():
        (folder / "syshaxd.toml.d" / f"{name}.toml").write_text(content)
    return ConfigFiles(main, True, folder / "state")


@given(st.sampled_from(KEYS), st.integers(0, 100), st.sampled_from("abcxyz_"), st.sampled_from(["drop", "add", "swap"]))
def test_a_misspelt_key_is_refused_and_the_right_one_named(key: str, where: int, letter: str, how: str) -> None:
    *tables, name = split_key(key)
    at = where % len(name)
    changed = {
        "drop": name[:at] + name[at + 1 :],
        "add": name[:at] + letter + name[at:],
        "swap": name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
    }[how]
    valid = {split_key(other)[-1] for other in KEYS if split_key(other)[:-1] == tables}
    if changed in valid or not changed:
        return
    values: Any = {changed: 1}
    for table in reversed(tables):
        values = {table: values}
    with pytest.raises(ConfigError) as caught:
        build(Config, [Layer("/etc/f.toml", values)])
    assert f"/etc/f.toml: {'.'.join([*tables, changed])}: unknown key" in caught.value.message
    assert "nearest valid key: " in caught.value.hint
    if len(name) > 4:
        assert key in caught.value.hint


@given(
    st.sampled_from([key for key in KEYS if not key.startswith("models.")]),
    st.sampled_from([3.5, "\0", {"a": 1}, [{}], True]),
)
def test_a_value_of_the_wrong_type_names_file_key_and_value(key: str, value: Any) -> None:
    if key == "cache.enabled" and value is True:
        return
    with pytest.raises(ConfigError) as caught:
        build(Config, [Layer("/etc/f.toml", unflatten({key: value}))])
    assert caught.value.message.startswith(f"/etc/f.toml: {key}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[compute]\nthreads = -1", "compute.threads: input should be greater than or equal to 0 (value: -1)"),
        ('[compute]\nthreads = "4"', "compute.threads: input should be a valid integer (value: '4')"),
        ("[compute]\nnodes = [0, 0]", "compute.nodes: expected every entry once"),
        ('[compute]\ncpus = "3-1"', 'compute.cpus: the range "3-1" runs backwards'),
        ('[compute]\nhuge_pages = "maybe"', "compute.huge_pages: input should be 'off', 'auto' or 'require'"),
        ("[compute]\nshares = [0.0]", "compute.shares"),
        ("[compute]\nshares = [nan]", "compute.shares"),
        ('[memory]\nlimit = "64XB"', "memory.limit: expected a size"),
        ('[cache]\nlimit = "101%"', "cache.limit: expected at most 100%"),
        ('[cache]\nreserve = "5 percent"', "cache.reserve: expected a size"),
        ('[cache]\ndirectory = "here"', "cache.directory: expected an absolute path"),
        ("[memory]\nlimit = -1", "memory.limit: expected a size between"),
        ("[precision]\nallowed_formats = [1]", "precision.allowed_formats"),
        ('[precision]\ndefault_format = "q 5"', "precision.default_format: string should match pattern"),
        ('[models.a]\npath = "relative"', "models.a.path: expected an absolute path"),
        ('[models."a/b"]\npath = "/x"', "models.a/b"),
        ("[models.a]\nautoload = true", "models.a.path: this key is required"),
        ("models = 3", "models: expected a table, [models]"),
        ("compute = 3", "compute: expected a table, [compute]"),
        ("[models.a]\npath = \"/x\"\nformat = \"f p\"", "models.a.format"),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        files_of(tmp_path, text).load()
    assert f"{tmp_path / 'syshaxd.toml'}: {words}" in caught.value.message


def test_the_error_names_the_drop_in_and_for_syntax_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"20-b\.toml: limits\.sessions"):
        files_of(tmp_path, "", **{"10-a": "[limits]\nsessions = 3", "20-b": "[limits]\nsessions = 0"}).load()
    with pytest.raises(ConfigError, match=r"20-b\.toml: not valid TOML: .*line 2"):
        files_of(tmp_path, "", **{"20-b": "[limits]\nsessions 3"}).load()
    with pytest.raises(ConfigError, match=r"20-b\.toml: not valid TOML: .*line 3"):
        files_of(tmp_path, "", **{"20-b": "[limits]\n\nsessions = ["}).load()
    with pytest.raises(ConfigError, match="no such file"):
        ConfigFiles(tmp_path / "absent.toml", required=True).load()
    assert ConfigFiles(tmp_path / "absent.toml").load().config == Config()


def test_formats_that_are_not_allowed_are_seen_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default_format = 'bf16' is not among precision\.allowed_formats \(q8_0\)"):
        files_of(tmp_path, '[precision]\nallowed_formats = ["q8_0"]').load()
    text = '[precision]\nallowed_formats = ["bf16"]\n[models.m]\npath = "/m"\nformat = "q4_0"\n'
    with pytest.raises(ConfigError, match=r"models\.m\.format = 'q4_0' is not among"):
        files_of(tmp_path, text).load()


def test_drop_ins_win_key_by_key_and_the_state_wins_over_all(tmp_path: Path) -> None:
    files = files_of(tmp_path, "[limits]\nsessions = 1\nslots = 2", **{"a": "[limits]\nsessions = 3"})
    files.save_overrides({"limits.slots": 5, "models.Qwen2.5.path": "/q"})
    loaded = files.load()
    assert (loaded.config.limits.sessions, loaded.config.limits.slots) == (3, 5)
    assert loaded.config.models["Qwen2.5"].path == "/q", "a model's name may hold dots"
    assert loaded.sources == {
        "limits.sessions": f"{files.main}.d/a.toml", "limits.slots": "state", "models.Qwen2.5.path": "state",
    }  # fmt: skip
    assert files.main.read_text() == "[limits]\nsessions = 1\nslots = 2", "the administrator's file is not touched"
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["overrides.toml"]


def test_set_applies_what_is_live_and_names_what_is_not(tmp_path: Path) -> None:
    files = files_of(tmp_path, "")
    live = LiveConfig(files, files.load(), lambda config: None)
    answer = live.set({"limits.sessions": 7, "compute.threads": 1, "limits.slots": 16}, "b")
    assert answer.applied == ["limits.sessions"] and answer.needs_restart == ["compute.threads"]
    assert answer.unchanged == ["limits.slots"]
    assert live.current().limits.sessions == 7 and live.current().compute.threads == 0
    assert files.load().config.compute.threads == 1, "kept for the next start"
    answer = live.set({"limits.sessions": None, "compute.threads": None}, "b")
    assert answer.applied == ["limits.sessions"] and not answer.needs_restart
    assert files.load().config == Config()


@pytest.mark.parametrize(
    "values", [{"limits.sesions": 1}, {"limits.sesions": None}, {"limits.sessions": "x"}, {"x": 1}, {"": 1}]
)
def test_a_wrong_set_changes_nothing(tmp_path: Path, values: dict[str, Any]) -> None:
    files = files_of(tmp_path, "")
    live = LiveConfig(files, files.load(), lambda config: None)
    with pytest.raises(ConfigError):
        live.set({"limits.slots": 3, **values}, "b")
    assert live.current() == Config() and files.load().config == Config()


def test_reload_takes_new_files_and_keeps_the_old_when_they_are_wrong(tmp_path: Path) -> None:
    files = files_of(tmp_path, "[limits]\nsessions = 1")
    live = LiveConfig(files, files.load(), lambda config: None)
    files_of(tmp_path, "[limits]\nsessions = 2\n[compute]\nspin_us = 9\n[models.m]\npath = '/m'")
    answer = live.reload("b")
    assert answer.applied == ["limits.sessions", "models.m.autoload", "models.m.path"]
    assert answer.needs_restart == ["compute.spin_us"] == live.needs_restart()
    files_of(tmp_path, "[limits]\nsessions = 0")
    with pytest.raises(ConfigError):
        live.reload("b")
    assert live.current().limits.sessions == 2


def test_an_unwritable_state_directory_is_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, "")
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(ConfigError, match=r"state.overrides\.toml"):
        files.save_overrides({"limits.slots": 3})
    with pytest.raises(ConfigError, match="state directory"):
        ConfigFiles(files.main).save_overrides({})


@given(st.integers(0, 1 << 60))
@example((1 << 53) + 1)
def test_sizes_survive_printing(size: int) -> None:
    assert parse_size(format_size(size)) == size == parse_size(size)


@given(st.integers(0, 1000), st.integers(0, 1 << 50))
def test_parts_of_a_disk(thousandths: int, size: int) -> None:
    text = f"{thousandths / 10:g}%"
    assert parse_disk_share(text) == parse_disk_share(f" {text} ") == text
    assert abs(disk_share(text, size) - size * thousandths / 1000) <= 1 + size * 1e-12
    assert disk_share(parse_disk_share(size), 7) == size


@given(st.sets(st.integers(0, 5000)))
def test_cpu_lists_survive_printing(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus)) == parse_cpus(sorted(cpus))


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_cpus):
        with suppress(ValueError):
            parse(text)


@pytest.mark.parametrize("file", ["etc/syshaxd.toml", "docs/CONFIG.md"])
def test_generated_documents_are_up_to_date(file: str) -> None:
    assert (ROOT / file).read_text() == config_docs.DOCUMENTS[file](), "run python -m syshaxd.config_docs"


def test_the_example_is_the_default_also_without_its_comment_signs() -> None:
    text = (ROOT / "etc/syshaxd.toml").read_text()
    assert build(Config, [Layer("example", tomllib.loads(text))])[0] == Config()
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith(("# [", "[")) or " = " in line]
    bare = tomllib.loads("\n".join(line for line in lines if line[0].islower() or line[0] == "["))
    config, sources = build(Config, [Layer("example", bare)])
    assert config.model_copy(update={"models": {}}) == Config()
    assert {key.replace("NAME", "tiny") for key in sources} == set(KEYS), "every key is there"


def test_every_key_says_whether_it_is_live() -> None:
    for key, field, live in live_keys():
        assert field.description and field.description.endswith("Live." if live else "Needs a restart."), key
        assert is_live(key.replace("NAME", "Qwen2.5")) == live
    assert set(dict(flatten(Config().model_dump()))) - {"models"} <= {key for key, _, _ in live_keys()}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "syshaxd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_line_has_its_promised_options_and_bench() -> None:
    text = run("--help").stdout
    for word in ("--config", "--runtime-dir", "--user", "--check-config", "--state-dir", "bench"):
        assert word in text
    assert all(word in run("bench", "--help").stdout for word in ("moe", "ring"))
    assert run("--version").stdout.startswith("syshaxd ")
    assert run("--nonsense").returncode == 2


def test_check_config(tmp_path: Path) -> None:
    files = files_of(tmp_path, "[limits]\nsessions = 3")
    good = run("--check-config", "--config", files.main, "--state-dir", tmp_path)
    assert (good.returncode, good.stderr) == (0, "") and good.stdout.startswith("ok")
    for text, words in [
        ("[limits]\nsesions = 3", "limits.sessions"),
        ("[compute]\nnodes = [77]", "this machine's nodes are"),
        ('[compute]\nisa = "sse9"', "sse9"),
        ('[precision]\ndefault_format = "fp8"', "precision.default_format: there is no format 'fp8'"),
    ]:
        bad = run("--check-config", "--config", files_of(tmp_path, text).main, "--state-dir", tmp_path)
        assert bad.returncode == 2 and words in bad.stderr, bad.stderr
        assert "Traceback" not in bad.stderr
