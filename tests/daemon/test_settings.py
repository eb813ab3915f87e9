"""Configuration errors name the source, the key and the nearest valid key; layers merge key by key."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ByteSize, Field

from syshax.errors import ConfigError
from syshaxd.settings import Layer, Settings, build, example_toml, read_toml, valid_keys, with_drop_ins


class Limits(Settings):
    sessions: int = Field(default=16, ge=1, description="Clients attached at once.")
    memory: ByteSize = Field(default=ByteSize(64 << 20), description="Bytes of experts.")


class Model(Settings):
    path: str = Field(description="The checkpoint's directory.")
    autoload: bool = Field(default=False, description="Load at start.")


class Sample(Settings):
    host: str = Field(default="127.0.0.1", description="Address.\nTwo lines.")
    nodes: list[int] | None = Field(default=None, description="NUMA nodes.")
    limits: Limits = Field(default=Limits(), description="Limits.")
    models: dict[str, Model] = Field(default={}, description="Models by name.")


def fault(**values: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(Sample, [Layer("/etc/x.toml", values)])
    return caught.value


def test_layers_merge_key_by_key_and_remember_their_source() -> None:
    first = Layer("a.toml", {"host": "::1", "limits": {"sessions": 3}, "models": {"m": {"path": "/a"}}})
    second = Layer("b.toml", {"limits": {"memory": "2 GiB"}, "models": {"m": {"autoload": True}}})
    settings, sources = build(Sample, [first, second])
    assert settings.limits == Limits(sessions=3, memory=ByteSize(2 << 30))
    assert settings.models["m"] == Model(path="/a", autoload=True)
    assert sources == {
        "host": "a.toml",
        "limits.sessions": "a.toml",
        "limits.memory": "b.toml",
        "models.m.path": "a.toml",
        "models.m.autoload": "b.toml",
    }
    assert first.values["limits"] == {"sessions": 3}, "a layer is never changed"


@pytest.mark.parametrize(
    ("values", "key", "near"),
    [
        ({"hots": "x"}, "hots", "host"),
        ({"limits": {"sesions": 1}}, "limits.sesions", "limits.sessions"),
        ({"sessions": 4}, "sessions", "limits.sessions"),
        ({"models": {"q": {"path": "/m", "autolaod": True}}}, "models.q.autolaod", "models.q.autoload"),
    ],
)
def test_unknown_key_names_the_nearest(values: dict[str, object], key: str, near: str) -> None:
    error = fault(**values)
    assert error.message == f"/etc/x.toml: {key}: unknown key"
    assert error.hint == f"nearest valid key: {near}"


def test_unlike_anything_has_no_hint() -> None:
    assert fault(zzqqxx=1).hint == ""


def test_wrong_values_say_what_was_seen() -> None:
    error = fault(limits={"sessions": 0, "memory": "lots"}, nodes=["a"], models={"q": {}})
    assert "limits.sessions: input should be greater than or equal to 1 (value: 0)" in error.message
    assert "limits.memory" in error.message and "'lots'" in error.message
    assert "nodes[0]" in error.message and "models.q.path: this key is required" in error.message
    assert all(line.startswith("/etc/x.toml: ") for line in error.message.splitlines())


def test_a_fault_names_the_layer_that_set_the_key() -> None:
    with pytest.raises(ConfigError, match=r"^b\.toml: limits\.sessions"):
        build(Sample, [Layer("a.toml", {"host": "h"}), Layer("b.toml", {"limits": {"sessions": -1}})])


def test_many_faults_are_counted() -> None:
    assert fault(**{f"k{i}": 1 for i in range(20)}).message.splitlines()[-1] == "and 12 more"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="directory"):
        read_toml(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("host = \n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not valid TOML: .*line 1"):
        read_toml(bad)
    bad.write_bytes(b'host = "\xff"')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_toml(bad)


def test_drop_ins_come_after_the_file_in_order(tmp_path: Path) -> None:
    main = tmp_path / "x.toml"
    assert with_drop_ins(main) == []
    main.write_text("")
    (tmp_path / "x.toml.d").mkdir()
    names = ["20-b.toml", "10-a.toml", "ignored.txt"]
    for name in names:
        (tmp_path / "x.toml.d" / name).write_text("")
    assert [path.name for path in with_drop_ins(main)] == ["x.toml", "10-a.toml", "20-b.toml"]


def test_the_example_has_every_key_and_its_default() -> None:
    text = example_toml(Sample, "Heading.")
    assert text.startswith("# Heading.\n")
    assert "# Address.\n# Two lines.\n" in text
    uncommented = "\n".join(
        line.removeprefix("# ") for line in text.splitlines() if " = " in line or line.startswith(("[", "# ["))
    )
    assert tomllib.loads(uncommented)["limits"] == {"sessions": 16, "memory": "64 MiB"}
    assert build(Sample, [Layer("example", tomllib.loads(text))])[0] == Sample()
    assert list(valid_keys(Sample)) == [
        "host", "nodes", "limits.sessions", "limits.memory", "models.NAME.path", "models.NAME.autoload",
    ]  # fmt: skip
