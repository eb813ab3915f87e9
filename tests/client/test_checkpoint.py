"""Checkpoint headers, strictly: what is right is read, all else is a CheckpointError with its file and tensor."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syshax.checkpoint import INDEX_FILE, Checkpoint, expert_fingerprint, read_header
from syshax.errors import CheckpointError

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
CONFIG = {"model_type": "qwen3_moe", "hidden_size": 8, "num_experts": 4, "torch_dtype": "bfloat16"}
Tensors = dict[str, tuple[str, list[int], bytes]]


def write(file: Path, tensors: Tensors, **changes: Any) -> Path:
    """A safetensors file; `changes` replace entries of the header, raw."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header | changes).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def tensor(dtype: str, *shape: int, seed: int = 0) -> tuple[str, list[int], bytes]:
    count = BYTES[dtype]
    for dimension in shape:
        count *= dimension
    return dtype, list(shape), random.Random(seed).randbytes(count)


def experts(layers: int = 2, style: str = "qwen", size: int = 300) -> Tensors:
    made = {}
    for layer in range(layers):
        for expert in range(4):
            for number, projection in enumerate(("gate_proj", "up_proj", "down_proj")):
                where = f"mlp.experts.{expert}.{projection}"
                if style == "mixtral":
                    where = f"block_sparse_moe.experts.{expert}.w{(1, 3, 2)[number]}"
                made[f"model.layers.{layer}.{where}.weight"] = tensor(
                    "BF16", 4, size, seed=layer * 100 + expert * 10 + number
                )
    return made


def checkpoint(path: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Checkpoint:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    write(path / "model.safetensors", tensors)
    return Checkpoint(path)


def sharded(path: Path, tensors: Tensors, shards: int) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write(path / file, part)
        weight_map |= dict.fromkeys(part, file)
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(list(BYTES)), st.lists(st.integers(0, 9), max_size=3)), max_size=8),
    shards=st.integers(1, 3),
)
def test_what_was_written_is_found(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, list[int]]], shards: int
) -> None:
    tensors = {f"t{i}": tensor(dtype, *shape, seed=i) for i, (dtype, shape) in enumerate(shapes)} or {"t": tensor("U8")}
    for made in (
        checkpoint(tmp_path_factory.mktemp("single"), tensors),
        Checkpoint(sharded(tmp_path_factory.mktemp("sharded"), tensors, min(shards, len(tensors)))),
    ):
        assert made.config == CONFIG and made.tensors.keys() == tensors.keys()
        for name, entry in made.tensors.items():
            dtype, shape, content = tensors[name]
            assert (entry.dtype, list(entry.shape)) == (dtype, shape)
            assert entry.file.read_bytes()[entry.begin : entry.end] == content


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"b": {"dtype": "F33", "shape": [3], "data_offsets": [8, 14]}}, "tensor b: dtype 'F33'"),
    ({"b": {"dtype": "F16", "shape": [4], "data_offsets": [8, 14]}}, r"tensor b: F16 \[4\] takes 8 bytes"),
    ({"b": {"dtype": "F16", "shape": [-3], "data_offsets": [8, 14]}}, "tensor b: shape"),
    ({"b": {"dtype": "F16", "shape": [True, 3], "data_offsets": [8, 14]}}, "tensor b: shape"),
    ({"b": {"dtype": "F16", "shape": "3", "data_offsets": [8, 14]}}, "tensor b: shape"),
    ({"b": {"dtype": "F16", "shape": [3], "data_offsets": [8]}}, "tensor b: data_offsets"),
    ({"b": {"dtype": "F16", "shape": [3], "data_offsets": [14, 8]}}, "tensor b"),
    ({"b": {"dtype": "F16", "shape": [3], "data_offsets": [6, 12]}}, "tensor b begins .* overlaps"),
    ({"b": {"dtype": "F16", "shape": [3], "data_offsets": [10, 16]}}, "tensor b: its data ends"),
    ({"b": {"dtype": "F16", "shape": [2], "data_offsets": [10, 14]}}, "tensor b begins .* hole"),
    ({"b": {"dtype": "F16", "shape": [1 << 62, 1 << 62], "data_offsets": [8, 14]}}, "tensor b"),
    ({"b": [1]}, "tensor b: its entry is not an object"),
    ({"b": {"dtype": "F16", "shape": [2], "data_offsets": [8, 12]}}, "bytes after the last tensor"),
    ({"__metadata__": 3}, "__metadata__"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_broken_entries(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    file = write(tmp_path / "x.safetensors", {"a": tensor("F32", 2), "b": tensor("F16", 3)}, **changes)
    with pytest.raises(CheckpointError, match=words) as error:
        list(read_header(file))
    assert str(file) in str(error.value)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error_or_still_consistent(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = write(
        tmp_path_factory.mktemp("damage") / "x.safetensors", {"a": tensor("F32", 2), "b": tensor("BF16", 3, 5)}
    )
    content = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "grow", "random"])):
        case "flip":
            for _ in range(data.draw(st.integers(1, 4))):
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "grow":
            content += bytes(data.draw(st.integers(1, 9)))
        case "random":
            content[8:] = data.draw(st.binary(max_size=100))
    file.write_bytes(content)
    try:
        found = dict(read_header(file))
    except CheckpointError as error:
        assert str(file) in str(error)
    else:
        assert sum(entry.end - entry.begin for entry in found.values()) <= len(content)


def test_what_a_directory_may_lack(tmp_path: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            Checkpoint(tmp_path / "model")

    refused("is not a directory")
    (tmp_path / "model").mkdir()
    refused("config.json: No such file")
    (tmp_path / "model" / "config.json").write_text("{broken")
    refused("config.json: broken JSON")
    (tmp_path / "model" / "config.json").write_text("[]")
    refused("not a JSON object")
    (tmp_path / "model" / "config.json").write_text('{"a": 1, "a": 2}')
    refused("a is named twice")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    refused(r"holds no safetensors files \(it holds pytorch_model.bin\)")
    (tmp_path / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused("Git LFS pointer")


def test_shards_and_index_must_agree(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {f"t{i}": tensor("F32", 2, seed=i) for i in range(4)}, 2)
    index = json.loads((path / INDEX_FILE).read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def refused(weight_map: Any, words: str) -> None:
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=re.escape(words)):
            Checkpoint(path)

    refused(index["weight_map"] | {"t0": second}, f"tensor t0 is not in {second}")
    refused(index["weight_map"] | {"t9": first}, f"tensor t9 is not in {first}")
    refused(index["weight_map"] | {"t9": "absent.safetensors"}, "absent.safetensors: No such file")
    refused(index["weight_map"] | {"t9": "../other.safetensors"}, "'../other.safetensors' is not the name")
    refused(index["weight_map"] | {"t9": 3}, "tensor t9: 3 is not the name")
    refused({}, "weight_map is missing or empty")
    write(path / second, {"t0": tensor("F32", 2), "t1": tensor("F32", 2), "t3": tensor("F32", 2)})
    refused(index["weight_map"], f"{second}: tensor t0 is in {first} too")


@pytest.mark.parametrize("style", ["qwen", "mixtral"])
def test_fingerprints_are_the_same_wherever_the_same_experts_lie(tmp_path: Path, style: str) -> None:
    tensors = experts(style=style)
    one = expert_fingerprint(checkpoint(tmp_path / "one", tensors))
    assert re.fullmatch("[0-9a-f]{64}", one)
    reordered = dict(reversed(tensors.items())) | {"lm_head.weight": tensor("F32", 3)}
    assert expert_fingerprint(checkpoint(tmp_path / "two", reordered, CONFIG | {"torch_dtype": "auto"})) == one
    assert expert_fingerprint(Checkpoint(sharded(tmp_path / "three", tensors, 3))) == one


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_fingerprints_see_each_sampled_part_of_each_tensor(tmp_path: Path, where: str) -> None:
    tensors = experts(layers=1)
    before = expert_fingerprint(checkpoint(tmp_path / "a", tensors))
    seen = {before}
    for name, (dtype, shape, content) in tensors.items():
        at = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[where]
        altered = bytearray(content)
        altered[at] ^= 1
        seen.add(expert_fingerprint(checkpoint(tmp_path / "b", tensors | {name: (dtype, shape, bytes(altered))})))
    assert len(seen) == len(tensors) + 1


def test_fingerprints_see_geometry_names_dtypes_and_shapes(tmp_path: Path) -> None:
    tensors = experts(layers=1)
    name = next(iter(tensors))
    dtype, shape, content = tensors[name]
    others = [
        checkpoint(tmp_path / "0", tensors),
        checkpoint(tmp_path / "1", tensors, CONFIG | {"num_experts_per_tok": 3}),
        checkpoint(tmp_path / "2", tensors | {name: ("F16", shape, content)}),
        checkpoint(tmp_path / "3", tensors | {name: (dtype, shape[::-1], content)}),
        checkpoint(tmp_path / "4", {n.replace("layers.0.", "layers.1."): t for n, t in tensors.items()}),
    ]
    assert len({expert_fingerprint(other) for other in others}) == len(others)


def test_no_experts_no_fingerprint(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "dense", {"model.layers.0.mlp.gate_proj.weight": tensor("F32", 2)})
    with pytest.raises(CheckpointError, match="no routed experts"):
        expert_fingerprint(made)


def test_files_that_change_under_the_reader(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "m", experts(layers=1))
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cut short"):
        expert_fingerprint(made)
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        expert_fingerprint(made)
