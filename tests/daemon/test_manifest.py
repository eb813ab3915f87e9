"""The description of packed arenas: whatever is not exactly what was written is refused, and so is whatever this
version, plan or configuration would read otherwise."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from fake_core import FakeCore
from hypothesis import given
from hypothesis import strategies as st

from syshaxd import loader
from syshaxd.config import Config
from syshaxd.core import CoreModel
from syshaxd.machine import Machine
from syshaxd.manifest import PackedModel, UnusableError, check_same_files, check_usable, describe, from_bytes, to_bytes
from syshaxd.planner import Plan, make_plan

NODES = [{"node": node, "memory_bytes": 1 << 34, "cores": [[node]]} for node in range(2)]


def two_nodes() -> FakeCore:
    return FakeCore({"source": "fake", "nodes": NODES})


def plan_of(core: FakeCore, **compute: Any) -> Plan:
    config = Config.model_validate({"compute": compute})
    return make_plan(core.topology(), config.compute, Machine(frozenset(range(2)), None))


def loaded(path: Path, core: FakeCore) -> tuple[PackedModel, CoreModel]:
    """A model in the fake core, and its description."""
    plan = plan_of(core)
    runtime = core.Runtime([node.as_core_plan() for node in plan.nodes], "", 0, "auto", 64)
    blueprint = loader.inspect(path, "q8_0")
    model: Any = runtime.create_model("m", blueprint.core_geometry, "q8_0")
    return describe(core, plan, model, blueprint, "m", Config(), "avx512"), model  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, shards=2)
    return loaded(path, two_nodes())[0]


def usable(packed: PackedModel, core: FakeCore | None = None, huge: Any = "auto", **compute: Any) -> None:
    core = core or two_nodes()
    plan = plan_of(core, **compute)
    runtime = core.Runtime([node.as_core_plan() for node in plan.nodes], "", 0, "auto", 64)
    check_usable(core, runtime, plan, packed, huge)  # type: ignore[arg-type]


def test_it_says_what_was_loaded(packed: PackedModel) -> None:
    assert packed.format == "q8_0" and packed.architecture == "Qwen3MoeForCausalLM" and packed.packing == "q8_0/1"
    assert [node.share for node in packed.nodes] == [0.5, 0.5] and [arena.index for arena in packed.arenas] == [0, 1]
    assert set(packed.files) == {"config.json"} | {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert from_bytes(to_bytes(packed)) == packed
    usable(packed)


@given(st.data())
def test_no_damage_goes_unseen(packed: PackedModel, data: st.DataObject) -> None:
    """Bits that flip, bytes that go missing, are put in or come twice: anywhere."""
    text = to_bytes(packed)
    place = data.draw(st.integers(0, len(text) - 1), "place")
    kind = data.draw(st.sampled_from(["flip", "cut", "drop", "insert", "zeros", "swap"]), "kind")
    damaged = {
        "flip": lambda: text[:place] + bytes([text[place] ^ 1 << data.draw(st.integers(0, 7))]) + text[place + 1 :],
        "cut": lambda: text[:place],
        "drop": lambda: text[:place] + text[place + 1 :],
        "insert": lambda: text[:place] + data.draw(st.binary(min_size=1, max_size=9)) + text[place:],
        "zeros": lambda: text[:place] + bytes(len(text) - place),
        "swap": lambda: text[place:] + text[:place],
    }[kind]()
    if damaged == text:
        return
    with pytest.raises(UnusableError):
        from_bytes(damaged)


@given(st.binary(max_size=400))
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(UnusableError):
        from_bytes(text)


MISSING = object()


def rewritten(packed: PackedModel, **changes: Any) -> bytes:
    """A manifest whose checksum is right, but which says something else; MISSING takes a field out."""
    changed = json.loads(packed.model_dump_json()) | changes
    fields = {name: value for name, value in changed.items() if value is not MISSING}
    body = json.dumps(fields).encode()
    return b"syshax-packed 1 %s\n%s" % (hashlib.sha256(body).hexdigest().encode(), body)


FIELDS = sorted(set(PackedModel.model_fields) - {"version", "generation", "configured"})
JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(FIELDS), st.just(MISSING) | st.none() | JSON)
def test_fields_of_another_kind_are_refused_or_harmless(packed: PackedModel, field: str, value: Any) -> None:
    """A manifest with any value in any field ends in UnusableError or in a model that can be described as it says."""
    try:
        read = from_bytes(rewritten(packed, **{field: value}))
        usable(read)
    except UnusableError:
        return
    assert read.arenas == packed.arenas and read.packing == packed.packing and read.nodes == packed.nodes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"fingerprint": MISSING}, "fingerprint: Field required"),
        ({"version": 2}, "fields are of version 2, this daemon knows 1"),
        ({"format": "q9"}, "there is no format q9"),
        ({"packing": "q8_0/2"}, "it is packed as q8_0/2, this version packs as q8_0/1"),
        ({"layout_version": 2}, "layout is version 2, this version's 1"),
        ({"nodes": [{"node": 0, "share": 1.0}], "arenas": []}, "was cut for node 0 with 1"),
        ({"nodes": [{"node": 0, "share": 0.4}, {"node": 1, "share": 0.6}]}, "node 1 with 0.6, the plan is now"),
        ({"arenas": [{"index": 0, "bytes": 4096, "sha256": ""}]}, "this version needs"),
        ({"arenas": [{"index": 7, "bytes": 4096, "sha256": ""}]}, r"arenas \[7\] for 2 nodes"),
        ({"arenas": [{"index": 0, "bytes": 4096}, {"index": 0, "bytes": 4096}]}, r"arenas \[0, 0\]"),
        ({"huge_pages": "require"}, "compute.huge_pages = require, which is now auto"),
        ({"name": "../etc"}, "name: String should match"),
    ],
)
def test_what_this_version_would_read_otherwise_is_refused(packed: PackedModel, changes: Any, text: str) -> None:
    with pytest.raises(UnusableError, match=text):
        usable(from_bytes(rewritten(packed, **changes)))


def test_plans_versions_and_settings_that_changed(packed: PackedModel) -> None:
    newer = two_nodes()
    newer.packing_version = 2
    with pytest.raises(UnusableError, match="it is packed as q8_0/1, this version packs as q8_0/2"):
        usable(packed, newer)
    newer = two_nodes()
    newer.ARENA_LAYOUT_VERSION = 2
    with pytest.raises(UnusableError, match="layout is version 1, this version's 2"):
        usable(packed, newer)
    for compute in ({"nodes": [0]}, {"nodes": [1, 0]}, {"shares": [2.0, 1.0]}):
        with pytest.raises(UnusableError, match="the plan is now"):
            usable(packed, **compute)
    with pytest.raises(UnusableError, match="which is now require"):
        usable(packed, huge="require")
    usable(packed, huge="off")
    usable(packed, isa="avx2")  # a format has one packing for all of an architecture's kernels
    with pytest.raises(UnusableError, match="there is no format"):
        usable(packed.model_copy(update={"format": "int8row"}))


def test_a_checkpoint_that_was_touched_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    packed, _ = loaded(tmp_path, two_nodes())
    assert check_same_files(packed, tmp_path)
    (tmp_path / "config.json").touch()
    assert not check_same_files(packed, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        check_same_files(packed, tmp_path)
