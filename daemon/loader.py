"""From a checkpoint directory to a loaded model: every check first, then layer by layer.

Owns the order of things: read headers, check all that could make a wrong number, compare sizes with limits and free
memory, and only then reserve; convert a layer at a time from mapped files, so that beside the pool there is never more
than page cache. Names of tensors are architectures.py's, memory and conversion the core's. Runs in a worker thread; it
touches no event loop and reports through `LoadProgress`.

Files are mapped, not read: a copy of one layer can be a large part of a small model, and the pages behind are given
back after each layer. Should a file be cut short meanwhile, the core's guard puts zero pages where the file ended and
says so, and the load fails by name (a bare mapping would end the process with SIGBUS).
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syshax.checkpoint import Checkpoint, TensorEntry, expert_fingerprint
from syshax.errors import CancelledError, CheckpointError, NoMemoryError
from syshax.protocol import Geometry, Progress, WeightFormat
from syshaxd.architectures import Architecture, find_architecture
from syshaxd.core import Core, CoreModel, CoreRuntime, GeometryDict, MappedFile, core_errors
from syshaxd.machine import memory_group_limit
from syshaxd.manifest import FileStamp, core_geometry, stamps
from syshaxd.planner import Plan
from syshaxd.quantities import human_size

_DTYPES = {"BF16": ("bfloat16", "u2"), "F16": ("float16", "f2"), "F32": ("float32", "f4")}
"""safetensors' word -> the core's, numpy's."""
CONFIG_FILE = "config.json"
_LARGEST = {"experts": 65536, "hidden": 1 << 20, "intermediate": 1 << 20, "layers": 2048, "top_k": 4096}
"""Beyond any published model; keeps products of sizes inside 64 bits."""


class LoadProgress:
    """How far a load is; written by the loading thread, read by any other."""

    def __init__(self) -> None:
        self.stage = "waiting"
        self.layers_done = self.layers_total = self.bytes_total = 0
        self.started: float | None = None
        self.ended: float | None = None

    def begin(self) -> None:
        self.stage, self.started = "checking", time.monotonic()

    def end(self) -> None:
        self.ended = time.monotonic()

    def message(self) -> Progress:
        done = self.bytes_total * self.layers_done // self.layers_total if self.layers_total else 0
        end = self.ended if self.ended is not None else time.monotonic()
        return Progress(
            stage=self.stage,
            layers_done=self.layers_done,
            layers_total=self.layers_total,
            bytes_done=done,
            bytes_total=self.bytes_total,
            seconds=end - self.started if self.started is not None else 0.0,
        )


@dataclass(frozen=True)
class Blueprint:
    """A checkpoint that passed every check, and what loading it will take."""

    path: Path
    architecture: Architecture
    checkpoint: Checkpoint
    geometry: Geometry
    fingerprint: str
    format: WeightFormat
    files: dict[str, FileStamp]
    """config.json and every file with tensors, by name."""
    node_bytes: tuple[int, ...] = ()
    """Arena bytes for each node of the plan."""

    @property
    def core_geometry(self) -> GeometryDict:
        return core_geometry(self.geometry)


# ---------------------------------------------------------------------- checks


def inspect(path: Path, format: WeightFormat) -> Blueprint:
    """Reads config and headers and checks them. Raises CheckpointError for whatever cannot be computed correctly."""
    checkpoint = Checkpoint(path)
    config, where = checkpoint.config, str(path / "config.json")
    architecture = find_architecture(config, where)
    _refuse_unsupported(config, architecture, where)
    geometry = _geometry(config, architecture, where)
    _check_tensors(checkpoint, architecture, geometry)
    fingerprint = expert_fingerprint(checkpoint)
    return Blueprint(path, architecture, checkpoint, geometry, fingerprint, format, _file_stamps(checkpoint))


def _file_stamps(checkpoint: Checkpoint) -> dict[str, FileStamp]:
    files = {CONFIG_FILE: checkpoint.path / CONFIG_FILE}
    files.update({entry.file.name: entry.file for entry in checkpoint.tensors.values()})
    try:
        return stamps(files)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error


def _refuse_unsupported(config: Mapping[str, Any], architecture: Architecture, where: str) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise CheckpointError(
            f"{where}: quantization_config (quant_method {method!r}): quantised checkpoints are not supported",
            "use the bf16, fp16 or fp32 checkpoint; syshax quantises while loading (--format q8_0 or q4_0)",
        )
    activation = config.get(architecture.activation_key, "silu")
    if activation != "silu":
        raise CheckpointError(
            f"{where}: {architecture.activation_key} is {activation!r}: experts with this activation are not supported",
            "supported: 'silu'",
        )
    if config.get("apply_router_weight_on_input"):
        raise CheckpointError(
            f"{where}: apply_router_weight_on_input is set: router weights on the experts' input are not supported",
            "supported: router weights on the experts' output",
        )


def _geometry(config: Mapping[str, Any], architecture: Architecture, where: str) -> Geometry:
    def size(what: str, *keys: str) -> int:
        key = next((key for key in keys if key in config), keys[0])
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST[what]:
            seen = repr(value) if key in config else "missing"
            raise CheckpointError(f"{where}: {key} is {seen}, expected a number from 1 to {_LARGEST[what]}")
        return value

    layers = size("layers", architecture.layers_key)
    _check_layer_rule(config, layers, where)
    layer_ids = [layer for layer in range(layers) if architecture.is_moe_layer(config, layer)]
    experts = size("experts", *architecture.experts_keys)
    top_k = size("top_k", architecture.top_k_key)
    if top_k > experts:
        raise CheckpointError(f"{where}: {architecture.top_k_key} is {top_k}, but there are {experts} experts")
    if not layer_ids:
        raise CheckpointError(f"{where}: none of the {layers} layers is a MoE layer: there are no experts to load")
    return Geometry(
        num_layers=len(layer_ids),
        num_experts=experts,
        hidden_size=size("hidden", architecture.hidden_key),
        intermediate_size=size("intermediate", architecture.intermediate_key),
        top_k=top_k,
        layer_ids=layer_ids,
    )


def _check_layer_rule(config: Mapping[str, Any], layers: int, where: str) -> None:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise CheckpointError(f"{where}: decoder_sparse_step is {step!r}, expected a number of at least 1")
    if not isinstance(dense, list) or not all(isinstance(layer, int) and 0 <= layer < layers for layer in dense):
        raise CheckpointError(f"{where}: mlp_only_layers is {dense!r}, expected layers from 0 to {layers - 1}")


def _check_tensors(checkpoint: Checkpoint, architecture: Architecture, geometry: Geometry) -> None:
    """All experts' tensors are there with the right shape, one dtype a layer, and nothing else lies among them."""
    wide = (geometry.intermediate_size, geometry.hidden_size)
    shapes = (wide, wide, wide[::-1])
    expected: set[str] = set()
    missing: list[str] = []
    for layer in geometry.layer_ids:
        dtypes: dict[str, str] = {}
        for expert in range(geometry.num_experts):
            for stem, shape in zip(architecture.tensor_names(layer, expert), shapes, strict=True):
                name = f"{stem}.weight"
                entry = checkpoint.tensors.get(name)
                expected.add(name)
                if entry is None:
                    missing.append(name)
                else:
                    _check_entry(name, entry, shape)
                    dtypes.setdefault(entry.dtype, name)
        if len(dtypes) > 1:
            seen = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise CheckpointError(f"{checkpoint.path}: the experts of layer {layer} differ in dtype: {seen}")
    _refuse_missing(checkpoint, missing, len(expected))
    _refuse_strangers(checkpoint, architecture, expected)


def _check_entry(name: str, entry: TensorEntry, shape: tuple[int, int]) -> None:
    if entry.shape != shape:
        raise CheckpointError(f"{entry.file}: {name} has the shape {list(entry.shape)}, config.json says {list(shape)}")
    if entry.dtype not in _DTYPES:
        raise CheckpointError(
            f"{entry.file}: {name} has the dtype {entry.dtype}, which is not supported",
            f"supported: {', '.join(_DTYPES)}",
        )


def _refuse_missing(checkpoint: Checkpoint, missing: Sequence[str], total: int) -> None:
    if missing:
        more = f" and {len(missing) - 1} more of {total}" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: the tensor {missing[0]}{more} is missing",
            "is the download complete, and does config.json belong to it?",
        )


def _refuse_strangers(checkpoint: Checkpoint, architecture: Architecture, expected: set[str]) -> None:
    """Tensors among the experts that the row does not know (biases, scales, more experts) would go missing."""
    pattern = re.escape(architecture.tensor)
    for name in ("layer", "expert"):
        pattern = pattern.replace(re.escape("{" + name + "}"), r"\d+")
    among = re.compile(pattern.replace(re.escape("{projection}"), ".*"))
    for name in checkpoint.tensors:
        if name not in expected and among.fullmatch(name):
            what = (
                "expert biases are not supported" if name.endswith(".bias") else "it has no place in this architecture"
            )
            raise CheckpointError(f"{checkpoint.tensors[name].file}: tensor {name}: {what}")


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class MemoryBudget:
    """What a load may take: read when it is checked, so that live changes count."""

    limit: int
    """Of all pools; 0: none."""
    reserve: int
    held: int
    """Bytes of the pools that are there."""


def sized(core: Core, runtime: CoreRuntime, plan: Plan, blueprint: Blueprint) -> Blueprint:
    """The blueprint with its bytes for each node. Raises CheckpointError for a shape the core refuses."""
    with core_errors(core):
        node_bytes = runtime.plan_bytes(
            blueprint.core_geometry, blueprint.format, [node.as_core_plan() for node in plan.nodes]
        )
    return Blueprint(**{**blueprint.__dict__, "node_bytes": tuple(node_bytes)})


def check_memory(core: Core, plan: Plan, blueprint: Blueprint, budget: MemoryBudget) -> None:
    """Raises NoMemoryError, with the numbers, where the limit, a node or the control group has too little."""
    need = sum(blueprint.node_bytes)
    what = f"{blueprint.path.name} as {blueprint.format} needs {human_size(need)}"
    smaller = "a smaller format (--format q4_0), or unload a model"
    if budget.limit and budget.held + need > budget.limit:
        raise NoMemoryError(
            f"{what}; memory.limit is {human_size(budget.limit)}, of which {human_size(budget.held)} are in use",
            f"raise memory.limit, choose {smaller}",
        )
    reserve = budget.reserve // len(plan.nodes)
    for node, node_need in zip(plan.nodes, blueprint.node_bytes, strict=True):
        free = core.node_free_bytes(node.node if node.bind else -1)
        if node_need + reserve > free:
            raise NoMemoryError(
                f"{what}, {human_size(node_need)} of it on node {node.node}, which has {human_size(free)} free less "
                f"{human_size(reserve)} of memory.reserve",
                f"free memory, choose {smaller}",
            )
    group = memory_group_limit()
    if group is not None and group[1] + need + budget.reserve > group[0]:
        raise NoMemoryError(
            f"{what}; the control group may use {human_size(group[0])}, {human_size(group[1])} of it in use, and "
            f"memory.reserve leaves {human_size(budget.reserve)} to sessions",
            f"raise MemoryMax= of the service or slice, choose {smaller}",
        )


# --------------------------------------------------------------------- loading


@dataclass
class _Source:
    """One mapped file of the checkpoint, and what it was when it was opened."""

    file: Path
    descriptor: int
    mapped: MappedFile
    identity: tuple[int, int, int, int]

    def check_unchanged(self) -> None:
        if self.mapped.cut_short() or _identity(self.descriptor) != self.identity:
            raise _changed(self.file)


def _changed(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} changed while it was being loaded", "load again when it is complete")


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def load(
    core: Core,
    runtime: CoreRuntime,
    blueprint: Blueprint,
    name: str,
    progress: LoadProgress,
    cancel: threading.Event,
) -> CoreModel:
    """Reserves the pool and fills it. Whatever goes wrong, nothing of it stays.

    Raises NoMemoryError, CheckpointError (a file that changed or was cut short), CancelledError.
    """
    with ExitStack() as stack, core_errors(core):
        sources = _open_sources(core, blueprint, stack)
        layers = blueprint.geometry.layer_ids

        def fill(model: CoreModel, index: int) -> None:
            _load_layer(model, blueprint, sources, index, layers[index])

        return filled(core, runtime, blueprint, name, progress, cancel, "converting", fill)


def filled(
    core: Core,
    runtime: CoreRuntime,
    blueprint: Blueprint,
    name: str,
    progress: LoadProgress,
    cancel: threading.Event,
    stage: str,
    fill: Callable[[CoreModel, int], None],
) -> CoreModel:
    """A new model whose every layer `fill(model, index)` has filled, sealed. Whatever goes wrong, nothing of it stays.

    Raises NoMemoryError, CancelledError, and what fill raises.
    """
    with core_errors(core):
        progress.stage = "reserving"
        model = runtime.create_model(name, blueprint.core_geometry, blueprint.format)
        try:
            progress.stage = stage
            for index in range(blueprint.geometry.num_layers):
                if cancel.is_set():
                    raise CancelledError(
                        f"loading {name} was cancelled after {index} of {progress.layers_total} layers"
                    )
                fill(model, index)
                progress.layers_done = index + 1
            progress.stage = "sealing"
            model.seal()
        except BaseException:
            runtime.drop_model(model)
            raise
        return model


def _open_sources(core: Core, blueprint: Blueprint, stack: ExitStack) -> dict[Path, _Source]:
    sources: dict[Path, _Source] = {}
    for entry in blueprint.checkpoint.tensors.values():
        if entry.file not in sources:
            try:
                descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
            except OSError as error:
                raise CheckpointError(f"{entry.file}: {error.strerror}") from error
            identity = _identity(descriptor)
            sources[entry.file] = _Source(entry.file, descriptor, core.GuardedFile(descriptor), identity)
        if entry.end > sources[entry.file].identity[2]:
            raise _changed(entry.file)
    return sources


def _load_layer(
    model: CoreModel, blueprint: Blueprint, sources: Mapping[Path, _Source], index: int, layer: int
) -> None:
    entries = _layer_entries(blueprint, layer)
    used = [sources[file] for file in {entry.file for group in entries for entry in group}]
    for source in used:
        source.check_unchanged()
    _prefetch(sources, entries)
    if index + 1 < blueprint.geometry.num_layers:  # the disk works on the next layer while the CPUs convert this one
        _prefetch(sources, _layer_entries(blueprint, blueprint.geometry.layer_ids[index + 1]))
    gate, up, down = ([_view(sources, entry) for entry in group] for group in entries)
    model.load_layer(index, gate, up, down, _DTYPES[entries[0][0].dtype][0])
    del gate, up, down
    for source in used:
        source.check_unchanged()
    for file, begin, end in _spans(entries):
        sources[file].mapped.release(begin, end - begin)


def _layer_entries(blueprint: Blueprint, layer: int) -> list[list[TensorEntry]]:
    """[gate, up, down], each with one entry for every expert."""
    names = [blueprint.architecture.tensor_names(layer, expert) for expert in range(blueprint.geometry.num_experts)]
    return [[blueprint.checkpoint.tensors[f"{of[projection]}.weight"] for of in names] for projection in range(3)]


def _prefetch(sources: Mapping[Path, _Source], entries: Sequence[Sequence[TensorEntry]]) -> None:
    for file, begin, end in _spans(entries):
        sources[file].mapped.prefetch(begin, end - begin)


def _view(sources: Mapping[Path, _Source], entry: TensorEntry) -> Any:
    """The tensor inside the mapped file; a copy only where the file holds it unaligned."""
    import numpy as np  # a daemon that loads nothing starts without it

    dtype = np.dtype(_DTYPES[entry.dtype][1])
    count = (entry.end - entry.begin) // dtype.itemsize
    file = memoryview(sources[entry.file].mapped)
    array = np.frombuffer(file, dtype, count, entry.begin).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()


def _spans(entries: Sequence[Sequence[TensorEntry]]) -> list[tuple[Path, int, int]]:
    """Where a layer's tensors lie: (file, begin, end), neighbours joined."""
    merged: list[tuple[Path, int, int]] = []
    for file, begin, end in sorted((entry.file, entry.begin, entry.end) for group in entries for entry in group):
        if merged and merged[-1][0] == file and begin <= merged[-1][2] + mmap.PAGESIZE:
            merged[-1] = (file, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((file, begin, end))
    return merged
