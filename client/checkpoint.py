"""Hugging Face checkpoint directories, read without torch: config.json and the headers of safetensors files.

Owns the strict reading of headers (nothing in them is believed before it is checked against the file) and the
fingerprint by which a worker and the daemon make sure that they hold the same experts. It knows the names of routed
experts and nothing else of architectures; weights stay in the files.

Format: https://huggingface.co/docs/safetensors - 8 bytes little-endian header length, a JSON object of tensors with
offsets relative to the header's end, then the data without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syshax.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself sets."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

EXPERT_TENSOR = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\."
    r"(?:block_sparse_moe\.experts\.(?P<mixtral_expert>\d+)\.(?P<mixtral_projection>w[123])"
    r"|mlp\.experts\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj))\.weight$"
)
"""Routed experts' weights: Mixtral's and Qwen2/3-MoE's names."""

GEOMETRY_FIELDS = (
    "model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_local_experts", "num_experts_per_tok", "decoder_sparse_step", "mlp_only_layers", "hidden_act",
)  # fmt: skip
"""Keys of config.json that the fingerprint covers; absent ones count as absent."""

_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [begin, end) of `file`, counted from the file's start; C order."""

    file: Path
    dtype: str
    """safetensors' word: "BF16", "F16", "F32", ..."""
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """The config and the tensors of one directory. Reads headers only.

    Raises CheckpointError (with file and tensor) for whatever is missing, broken or inconsistent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a directory",
                "give a Hugging Face checkpoint directory: config.json and *.safetensors",
            )
        self.config: dict[str, Any] = _read_json(self.path / "config.json")
        self.tensors: dict[str, TensorEntry] = {}
        weight_map = self._weight_map()
        for file in self._files(weight_map):
            for name, entry in read_header(file):
                if name in self.tensors:
                    raise CheckpointError(f"{file}: tensor {name} is in {self.tensors[name].file.name} too")
                self.tensors[name] = entry
        self._check_index(weight_map)

    def _weight_map(self) -> dict[str, str] | None:
        index = self.path / INDEX_FILE
        if not index.exists():
            return None
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: tensor {name}: {file!r} is not the name of a safetensors file beside it"
                )
        return weight_map

    def _files(self, weight_map: dict[str, str] | None) -> list[Path]:
        if weight_map is not None:
            return [self.path / file for file in sorted(set(weight_map.values()))]
        single = self.path / SINGLE_FILE
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            other = sorted(file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in self.path.glob(pattern))
            seen = f" (it holds {', '.join(other[:3])})" if other else ""
            raise CheckpointError(f"{self.path} holds no safetensors files{seen}", "save the model as safetensors")
        return files

    def _check_index(self, weight_map: dict[str, str] | None) -> None:
        for name, file in (weight_map or {}).items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise CheckpointError(f"{self.path / INDEX_FILE}: tensor {name} is not in {file}")


def read_header(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    """The tensors of one safetensors file, in the data's order, each checked."""
    header, data_begin, file_bytes = _header(file)
    entries = sorted(
        (_entry(file, name, value, data_begin, file_bytes) for name, value in header.items()), key=_by_place
    )
    expected = data_begin
    for name, entry in entries:
        if entry.begin != expected:
            what = "overlaps the tensor before it" if entry.begin < expected else "leaves a hole before it"
            raise CheckpointError(f"{file}: tensor {name} begins at byte {entry.begin}, not {expected}: it {what}")
        expected = entry.end
        yield name, entry
    if expected != file_bytes:
        raise CheckpointError(f"{file}: {file_bytes - expected} bytes after the last tensor belong to none")


def _by_place(item: tuple[str, TensorEntry]) -> tuple[int, int]:
    return item[1].begin, item[1].end


def _header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header's tensors, the offset at which the data begins, the file's size."""
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: not a safetensors file: a header of {header_bytes} bytes in a file of {file_bytes}",
                    "the download may be incomplete, or a Git LFS pointer",
                )
            text = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    header = _parse_json(file, text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{file}: __metadata__ is not an object")
    return header, 8 + header_bytes, file_bytes


def _entry(file: Path, name: str, value: Any, data_begin: int, file_bytes: int) -> tuple[str, TensorEntry]:
    where = f"{file}: tensor {name}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: its entry is not an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: dtype {dtype!r} is not known (known: {', '.join(DTYPE_BITS)})")
    if not isinstance(shape, list) or not all(_is_size(dimension) for dimension in shape):
        raise CheckpointError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets {offsets!r} are not two offsets")
    begin, end = data_begin + offsets[0], data_begin + offsets[1]
    if begin > end or end > file_bytes:
        raise CheckpointError(f"{where}: its data ends at byte {end}, the file has {file_bytes}", "is it cut short?")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != end - begin:
        raise CheckpointError(f"{where}: {dtype} {shape} takes {bits / 8:g} bytes, the file gives it {end - begin}")
    return name, TensorEntry(file, dtype, tuple(shape), begin, end)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return _parse_json(file, file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise CheckpointError(f"{file}: {next(n for n in names if names.count(n) > 1)} is named twice")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: broken JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value


def expert_fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 (hex) over the geometry's config fields and, of every routed expert's tensor, name, dtype, shape and the
    first, middle and last 256 bytes. Equal on any machine and directory for the same experts.

    Raises CheckpointError where there are no routed experts or a file cannot be read.
    """
    names = sorted(name for name in checkpoint.tensors if EXPERT_TENSOR.search(name))
    if not names:
        raise CheckpointError(
            f"{checkpoint.path} has no routed experts that this version knows",
            "known: Mixtral (block_sparse_moe.experts) and Qwen2/Qwen3-MoE (mlp.experts), one tensor for each expert",
        )
    fields = {key: checkpoint.config[key] for key in GEOMETRY_FIELDS if key in checkpoint.config}
    fields["architectures"] = checkpoint.config.get("architectures")
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    with ExitStack() as stack:
        opened: dict[Path, int] = {}
        for name in names:
            entry = checkpoint.tensors[name]
            if entry.file not in opened:
                opened[entry.file] = _open(stack, entry.file)
            digest.update(f"\n{name} {entry.dtype} {entry.shape}\n".encode())
            digest.update(_sample(opened[entry.file], entry))
    return digest.hexdigest()


def _open(stack: ExitStack, file: Path) -> int:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    stack.callback(os.close, descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _sample(descriptor: int, entry: TensorEntry) -> bytes:
    count = min(_SAMPLE_BYTES, entry.end - entry.begin)
    middle = (entry.begin + entry.end - count) // 2
    parts = [os.pread(descriptor, count, offset) for offset in (entry.begin, middle, entry.end - count)]
    if any(len(part) != count for part in parts):
        raise CheckpointError(f"{entry.file}: cut short while it was read")
    return b"".join(parts)
