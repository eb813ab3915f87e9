"""Which models there are and in what state: loading, ready, failed with the reason, unloading.

Owns the life of a model between a request to load it and its memory being free again, and who may ask for what. All
state lives on the event loop; the work is done one model at a time in one loading thread (loader.py). Sessions hold a
model by being in `Entry.sessions`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from syshax.errors import (
    CancelledError,
    InvalidArgumentError,
    ModelExistsError,
    ModelInUseError,
    ModelNotReadyError,
    NoMemoryError,
    NotAllowedError,
    ShuttingDownError,
    SyshaxError,
    UnknownModelError,
)
from syshax.protocol import (
    Dtype,
    ExpertsAnswer,
    Geometry,
    LoadRequest,
    ModelInfo,
    ModelOrigin,
    ModelState,
    WeightFormat,
)
from syshaxd import loader
from syshaxd.cache.packed_cache import PackedCache
from syshaxd.config import Config
from syshaxd.core import Core, CoreModel, CoreRuntime, core_errors
from syshaxd.keeping import Keeper
from syshaxd.loader import Blueprint, LoadProgress, MemoryBudget
from syshaxd.manifest import PackedModel, describe
from syshaxd.planner import Plan
from syshaxd.quantities import human_size

log = logging.getLogger(__name__)
UNLOAD_WAIT_SECONDS = 10.0
"""How long an unload waits for a load in progress to stop (one layer) before it answers "unloading"."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model once its checkpoint was looked at."""

    architecture: str
    geometry: Geometry
    fingerprint: str


@dataclass(eq=False)
class Entry:
    """One model that was asked for. `model` is there when ready (and while unloading)."""

    name: str
    path: Path
    format: WeightFormat
    state: ModelState = ModelState.LOADING
    reason: str = ""
    facts: ModelFacts | None = None
    origin: ModelOrigin = "checkpoint"
    model: CoreModel | None = None
    packed: PackedModel | None = None
    """What its arenas hold, once they are sealed."""
    progress: LoadProgress = field(default_factory=LoadProgress)
    cancel: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    sessions: set[int] = field(default_factory=set)
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_for(self, path: Path, format: WeightFormat | None) -> bool:
        """Whether a load of that path and format would give this."""
        return same_path(self.path, path) and format in (None, self.format)


def same_path(left: Path, right: Path) -> bool:
    return os.path.realpath(left) == os.path.realpath(right)


class Registry:
    """`config` is called at each use, so that live changes count. `isa` is the one in effect. `end_sessions` ends all
    sessions of an entry."""

    def __init__(
        self,
        core: Core,
        runtime: CoreRuntime,
        plan: Plan,
        config: Callable[[], Config],
        keeper: Keeper,
        cache: PackedCache,
        isa: str,
    ) -> None:
        self._core, self._runtime, self._plan, self._config = core, runtime, plan, config
        self._keeper, self._cache, self._isa = keeper, cache, isa
        self._entries: dict[str, Entry] = {}
        self._thread = ThreadPoolExecutor(1, "load")
        self._closing = False
        self.end_sessions: Callable[[Entry, str], None] = lambda entry, reason: None

    # ------------------------------------------------------------------ reading

    def entries(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def pool_bytes(self) -> int:
        return sum(entry.model.pool_bytes() for entry in self.entries() if entry.model)

    def infos(self) -> list[ModelInfo]:
        """All models, those of the configuration that are not loaded included, by name."""
        configured = [self._configured_info(name) for name in self._config().models if name not in self._entries]
        return sorted([self.info(entry) for entry in self.entries()] + configured, key=lambda info: info.name)

    def info_of(self, name: str) -> ModelInfo:
        if name in self._entries:
            return self.info(self._entries[name])
        if name in self._config().models:
            return self._configured_info(name)
        raise self._unknown(name)

    def experts(self, name: str, boot_id: str) -> ExpertsAnswer:
        """Who was asked for how often. Raises UnknownModelError, ModelNotReadyError."""
        entry = self.ready(name)
        assert entry.model is not None and entry.facts is not None
        geometry = entry.facts.geometry
        model = entry.model
        expert_bytes = model.pool_bytes() // (geometry.num_layers * geometry.num_experts)
        return ExpertsAnswer(
            boot_id=boot_id,
            name=name,
            layers=geometry.num_layers,
            experts=geometry.num_experts,
            layer_ids=geometry.layer_ids,
            tokens=model.expert_tokens().tolist(),
            expert_bytes=expert_bytes,
            bytes_read=model.expert_reads() * expert_bytes,
        )

    def info(self, entry: Entry) -> ModelInfo:
        model, facts = entry.model, entry.facts
        return ModelInfo(
            name=entry.name,
            path=str(entry.path),
            format=entry.format,
            state=entry.state,
            reason=entry.reason,
            configured=entry.name in self._config().models,
            origin=entry.origin,
            architecture=facts.architecture if facts else "",
            geometry=facts.geometry if facts else None,
            fingerprint=facts.fingerprint if facts else "",
            progress=entry.progress.message(),
            node_bytes=self.by_node(model.node_bytes()) if model else {},
            kernels={Dtype(dtype): kernel for dtype, kernel in model.kernels().items()} if model else {},
            sessions=len(entry.sessions),
            forward_calls=model.forward_calls() if model else 0,
        )

    def by_node(self, by_index: dict[int, int]) -> dict[int, int]:
        """The core counts nodes by their place in the plan; everyone else by the system's number."""
        return {self._plan.nodes[index].node: value for index, value in by_index.items()}

    def _configured_info(self, name: str) -> ModelInfo:
        config = self._config()
        return ModelInfo(
            name=name,
            path=config.models[name].path,
            format=config.model_format(name),
            state=ModelState.CONFIGURED,
            configured=True,
        )

    def _unknown(self, name: str) -> UnknownModelError:
        names = sorted({*self._entries, *self._config().models})
        near = get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"models: {', '.join(names)}" if names else "none is loaded"
        return UnknownModelError(f"there is no model named {name!r}", hint)

    def ready(self, name: str) -> Entry:
        """The entry of a model that can be attached to. Raises UnknownModelError or ModelNotReadyError."""
        entry = self._entries.get(name)
        if entry is not None and entry.state is ModelState.READY:
            return entry
        if entry is None:
            if name in self._config().models:
                raise ModelNotReadyError(
                    f"{name} is configured but not loaded", f"load it: syshaxctl load --name {name}, or autoload = true"
                )
            raise self._unknown(name)
        if entry.state is ModelState.FAILED:
            raise ModelNotReadyError(
                f"{name} could not be loaded: {entry.reason}", "remove the cause, then load it again"
            )
        done = entry.progress
        loading = f"loading ({done.stage}, layer {done.layers_done} of {done.layers_total})"
        state = loading if entry.state is ModelState.LOADING else "being unloaded"
        raise ModelNotReadyError(f"{name} is {state}", "try again later")

    # ------------------------------------------------------------------ loading

    def load(self, request: LoadRequest, administrator: bool) -> Entry:
        """Starts loading, or gives what is there already. Returns at once.

        Raises NotAllowedError, UnknownModelError, InvalidArgumentError, ModelExistsError, ModelNotReadyError (it is
        being unloaded), ShuttingDownError.
        """
        if self._closing:
            raise ShuttingDownError("the daemon is stopping")
        path, format = self._resolve(request, administrator)
        entry = self._entries.get(request.name)
        if entry is not None and entry.state is ModelState.UNLOADING:
            raise ModelNotReadyError(f"{request.name} is being unloaded", "try again when it is gone")
        if entry is not None and entry.state is not ModelState.FAILED:
            if entry.is_for(path, format if request.format or request.path else None):
                return entry
            raise ModelExistsError(
                f"{request.name} is {entry.path} as {entry.format}, not {path} as {format}",
                "unload it first, or load under another name",
            )
        return self._start(Entry(request.name, path, format))

    def _resolve(self, request: LoadRequest, administrator: bool) -> tuple[Path, WeightFormat]:
        config = self._config()
        configured, known = config.models.get(request.name), self._entries.get(request.name)
        path = self._requested_path(request)
        if configured is not None and (path is None or same_path(path, Path(configured.path))):
            own = config.model_format(request.name)
            path, format, free = Path(configured.path), request.format or own, request.format in (None, own)
        elif path is not None:
            format, free = request.format or config.precision.default_format, False
        elif known is not None:
            path, format, free = known.path, request.format or known.format, known.state is not ModelState.FAILED
        else:
            raise self._unknown(request.name)
        if not administrator and not free:
            raise NotAllowedError(
                f"only administrators may load {path} as {format}",
                f"name the model in the configuration, [models.{request.name}], or join the group "
                f"{config.access.admin_group}",
            )
        formats = self._core.formats()
        if format not in formats:
            raise InvalidArgumentError(f"there is no format {format}", f"formats: {', '.join(formats)}")
        if not config.allows_format(format):
            allowed = ", ".join(config.precision.allowed_formats)
            raise InvalidArgumentError(f"the format {format} is not allowed here", f"allowed: {allowed}")
        return path, format

    @staticmethod
    def _requested_path(request: LoadRequest) -> Path | None:
        if request.path is None:
            return None
        if not request.path.startswith("/") or "\0" in request.path:
            raise InvalidArgumentError(f"the path {request.path!r} is not absolute", "the daemon has its own directory")
        return Path(os.path.normpath(request.path))

    def _start(self, entry: Entry) -> Entry:
        self._entries[entry.name] = entry
        entry.task = asyncio.get_running_loop().create_task(self._load(entry), name=f"load {entry.name}")
        return entry

    async def _load(self, entry: Entry) -> None:
        log.info("loading %s", entry.name, extra={"model": entry.name, "path": str(entry.path), "format": entry.format})
        try:
            entry.model = await asyncio.get_running_loop().run_in_executor(self._thread, self._load_blocking, entry)
        except CancelledError as error:
            log.info("%s", error, extra={"model": entry.name})
            self._forget(entry)
        except SyshaxError as error:
            self._fail(entry, str(error))
            log.warning("loading %s failed: %s", entry.name, error, extra={"model": entry.name})
        except MemoryError:
            self._fail(entry, str(NoMemoryError("the daemon ran out of memory for its own tables")))
        except Exception as error:
            self._fail(entry, f"internal error: {type(error).__name__}: {error} (the daemon's log has the details)")
            log.exception("loading %s failed", entry.name, extra={"model": entry.name})
        else:
            if entry.cancel.is_set():
                await self._drop(entry)
                return
            entry.state, entry.progress.stage = ModelState.READY, "ready"
            progress = entry.progress.message()
            log.info(
                "%s is ready: %s in %.1f s", entry.name, human_size(progress.bytes_total), progress.seconds,
                extra={
                    "model": entry.name, "origin": entry.origin,
                    "kernels": ",".join(sorted(set(entry.model.kernels().values()))),
                },
            )  # fmt: skip
            if entry.packed is not None:
                self._cache.save(entry.packed, entry.model)

    def _fail(self, entry: Entry, reason: str) -> None:
        entry.state, entry.reason, entry.progress.stage = ModelState.FAILED, reason, "failed"

    def _load_blocking(self, entry: Entry) -> CoreModel:
        """In the loading thread: checks, then the load."""
        progress = entry.progress
        if entry.cancel.is_set():
            raise CancelledError(f"loading {entry.name} was cancelled before it began")
        progress.begin()
        try:
            blueprint = loader.sized(self._core, self._runtime, self._plan, loader.inspect(entry.path, entry.format))
            progress.layers_total = blueprint.geometry.num_layers
            progress.bytes_total = sum(blueprint.node_bytes)
            entry.facts = ModelFacts(blueprint.architecture.name, blueprint.geometry, blueprint.fingerprint)
            loader.check_memory(self._core, self._plan, blueprint, self._budget())
            model = self._cache.load(blueprint, entry.name, progress, entry.cancel)
            if model is not None:
                entry.origin = "cache"
            else:
                model = loader.load(self._core, self._runtime, blueprint, entry.name, progress, entry.cancel)
            progress.stage = "keeping"
            self._keep(entry, blueprint, model)
            return model
        finally:
            progress.end()

    def _keep(self, entry: Entry, blueprint: Blueprint, model: CoreModel) -> None:
        """For the next life of the daemon. Whatever goes wrong, this one has the model."""
        try:
            with core_errors(self._core):
                packed = describe(self._core, self._plan, model, blueprint, entry.name, self._config(), self._isa)
                arenas = model.arenas()
            entry.packed = packed
            try:
                self._keeper.keep(packed, arenas)
            finally:
                for arena in arenas:
                    os.close(arena["fd"])
        except Exception:
            log.exception("%s is not kept for a restart of the daemon", entry.name)

    def adopt(self, packed: PackedModel, model: CoreModel) -> None:
        """Enters a model of the daemon's last life, ready to serve."""
        facts = ModelFacts(packed.architecture, packed.geometry, packed.fingerprint)
        entry = Entry(
            packed.name, Path(packed.path), packed.format, ModelState.READY, facts=facts, origin="restart", model=model
        )
        entry.packed = packed
        entry.progress.stage, entry.progress.bytes_total = "ready", packed.total_bytes
        entry.progress.layers_done = entry.progress.layers_total = packed.geometry.num_layers
        self._entries[packed.name] = entry

    def save_adopted(self) -> None:
        """Gives adopted models to the cache: the daemon may have ended before they were written."""
        for entry in self.entries():
            if entry.origin == "restart" and entry.packed is not None and entry.model is not None:
                self._cache.save(entry.packed, entry.model)

    async def prefault(self) -> None:
        """Maps what was adopted before requests meet it page by page. What the machine's memory has spoilt meanwhile is
        loaded again: whoever reads it would end, and the service manager would keep it for the next daemon."""
        for entry in self.entries():
            if entry.origin != "restart" or (model := entry.model) is None:
                continue
            try:
                with core_errors(self._core):
                    await asyncio.to_thread(model.prefault)
            except SyshaxError as error:
                log.error("%s", error, extra={"model": entry.name})
                if not self._closing and entry.state is ModelState.READY:
                    await self._drop(entry)
                    self.load_again(LoadRequest(name=entry.name, path=str(entry.path), format=entry.format))

    def _budget(self) -> MemoryBudget:
        memory = self._config().memory
        return MemoryBudget(memory.limit, memory.reserve, self.pool_bytes())

    def autoload(self, already: frozenset[str] = frozenset()) -> list[str]:
        """Starts all configured models with autoload that are not there; `already` names those to leave alone."""
        started: list[str] = []
        if self._closing:
            return started
        for name, model in self._config().models.items():
            if model.autoload and name not in self._entries and name not in already:
                self._autoload(name)
                started.append(name)
        return started

    def _autoload(self, name: str) -> None:
        config = self._config()
        self.load_again(LoadRequest(name=name, path=config.models[name].path, format=config.model_format(name)))

    def load_again(self, request: LoadRequest) -> None:
        """Starts a load that nobody waits for, with path and format: what refuses it is the entry's reason."""
        assert request.path is not None and request.format is not None
        try:
            self.load(request, administrator=True)
        except InvalidArgumentError as error:  # its format is gone with the library that had it
            entry = Entry(request.name, Path(request.path), request.format)
            self._entries[request.name] = entry
            self._fail(entry, str(error))
            log.warning("loading %s failed: %s", request.name, error, extra={"model": request.name})

    # ---------------------------------------------------------------- unloading

    async def unload(self, name: str, force: bool) -> ModelState | None:
        """Frees a model, cancels a load, forgets a failure. None: gone; UNLOADING: a load has yet to stop.

        Raises UnknownModelError, ModelInUseError (sessions, without force), ModelNotReadyError (unloading already).
        """
        entry = self._entries.get(name)
        if entry is None:
            if name in self._config().models:
                return None
            raise self._unknown(name)
        if entry.state is ModelState.UNLOADING:
            raise ModelNotReadyError(f"{name} is being unloaded already")
        if entry.sessions and not force:
            raise ModelInUseError(
                f"{name} has {len(entry.sessions)} sessions", "stop its workers, or unload with --force"
            )
        if entry.state is ModelState.FAILED:
            self._forget(entry)
            return None
        if entry.state is ModelState.LOADING:
            return await self._cancel_load(entry)
        await self._drop(entry)
        return None

    async def _cancel_load(self, entry: Entry) -> ModelState | None:
        entry.cancel.set()
        entry.state = ModelState.UNLOADING
        try:
            await asyncio.wait_for(entry.freed.wait(), UNLOAD_WAIT_SECONDS)
        except TimeoutError:
            return ModelState.UNLOADING
        return None

    async def _drop(self, entry: Entry) -> None:
        entry.state = ModelState.UNLOADING
        self.end_sessions(entry, f"{entry.name} is unloaded")
        model, entry.model = entry.model, None
        await asyncio.to_thread(self._keeper.forget, entry.name)
        await asyncio.to_thread(self._cache.forget, entry.name)
        if model is not None:
            await asyncio.to_thread(self._runtime.drop_model, model)
        log.info("%s is unloaded", entry.name, extra={"model": entry.name})
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        entry.freed.set()

    def cancel_loads(self) -> None:
        """No new loads; those there are stop at the end of their layer."""
        self._closing = True
        for entry in self.entries():
            entry.cancel.set()

    async def close(self) -> None:
        """Waits for the load in progress to stop."""
        self.cancel_loads()
        loads = [entry.task for entry in self.entries() if entry.task and not entry.task.done()]
        if loads:
            await asyncio.wait(loads)
        self._thread.shutdown()
