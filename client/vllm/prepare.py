"""Getting the daemon ready for a worker: which of its models this checkpoint is, asking for it, waiting, comparing.

Used twice: by the launcher, so that a refusal is one clear message before vLLM starts, and by the worker process
itself, so that `vllm serve` alone is as safe, and again whenever the daemon came back without the model. Must not
import vllm or torch.
"""

from __future__ import annotations

import difflib
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from syshax.checkpoint import Checkpoint, expert_fingerprint
from syshax.errors import (
    CheckpointError,
    ConfigError,
    DaemonAbsentError,
    DaemonLostError,
    FingerprintError,
    ModelNotReadyError,
    NotAllowedError,
    RequestTimeoutError,
    ShuttingDownError,
    UnknownModelError,
)
from syshax.protocol import Geometry, KernelsAnswer, LoadRequest, ModelInfo, ModelsAnswer, ModelState, StatusAnswer
from syshax.vllm.settings import WorkerSettings

Report = Callable[[str], None]
Message = TypeVar("Message", bound=BaseModel)
GONE = (DaemonAbsentError, DaemonLostError, ShuttingDownError)
"""What calls raise while a daemon restarts."""


class ControlApi(Protocol):
    """What is used of syshax.control.Control."""

    def get(self, path: str, answer: type[Message]) -> Message: ...
    def post(self, path: str, body: BaseModel | None, answer: type[Message]) -> Message: ...


def wait_for_daemon(control: ControlApi, timeout_s: float, report: Report) -> StatusAnswer:
    """The status of a daemon that is up. Raises DaemonAbsentError (or why it cannot be reached) after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    said = False
    while True:
        try:
            return control.get("/v1/status", StatusAnswer)
        except GONE as error:
            if time.monotonic() >= deadline:
                raise
            if not said:
                report(f"{error.message}; waiting up to {timeout_s:g} s for it")
                said = True
            time.sleep(0.25)


def check_format(control: ControlApi, settings: WorkerSettings) -> None:
    """Raises ConfigError when the daemon knows no format of that name."""
    if settings.format is None:
        return
    known = sorted({kernel.format for kernel in control.get("/v1/kernels", KernelsAnswer).kernels})
    if settings.format not in known:
        near = difflib.get_close_matches(settings.format, known, 1, 0.0)
        raise ConfigError(
            f'syshaxd knows no weight format "{settings.format}"; it has {", ".join(known)}',
            f"did you mean {near[0]}?" if near else "see `syshaxctl kernels`",
        )


def find_model(control: ControlApi, path: Path, settings: WorkerSettings) -> tuple[str, ModelInfo | None]:
    """The model's name in the daemon and what the daemon says of it (None: it has never heard of it).

    The name is the setting's, else that of the model there whose path is this checkpoint's, else the directory's.
    """
    models = control.get("/v1/models", ModelsAnswer).models
    if settings.model is None:
        for model in models:
            if os.path.realpath(model.path) == os.path.realpath(path):
                return model.name, model
    name = settings.model or path.resolve().name
    return name, next((model for model in models if model.name == name), None)


def prepare(control: ControlApi, path: Path, settings: WorkerSettings, report: Report, deadline: float) -> ModelInfo:
    """Returns when the daemon holds the model of that checkpoint ready; asks for it where it does not.

    `deadline` is on time.monotonic(). Raises what the daemon refuses with, FingerprintError, ModelNotReadyError when
    loading failed (with the reason), RequestTimeoutError after the deadline.
    """
    model = _find_or_ask(control, path, settings, report)
    model = _wait_until(_is_ready, control, model, report, deadline)
    compare_fingerprint(model, path)
    return model


def find_ready(control: ControlApi, path: Path, settings: WorkerSettings) -> ModelInfo:
    """Like `prepare`, but asks for nothing and waits for nothing: raises ModelNotReadyError unless it is ready now."""
    name, model = find_model(control, path, settings)
    if model is None or not _is_ready(model):
        raise ModelNotReadyError(
            f"model {name} was unloaded", f"an administrator can load it: syshaxctl load {os.path.realpath(path)}"
        )
    compare_fingerprint(model, path)
    return model


def ask_for_model(control: ControlApi, path: Path, settings: WorkerSettings, report: Report) -> ModelInfo:
    """Like `prepare`, but leaves a load that has passed the daemon's checks to go on: vLLM starts meanwhile."""
    model = _find_or_ask(control, path, settings, report)
    model = _wait_until(_is_under_way, control, model, report, time.monotonic() + settings.load_timeout_s)
    compare_fingerprint(model, path)
    return model


def _is_ready(model: ModelInfo) -> bool:
    return model.state is ModelState.READY


def _is_under_way(model: ModelInfo) -> bool:
    return _is_ready(model) or (model.state is ModelState.LOADING and model.progress.bytes_done > 0)


def _find_or_ask(control: ControlApi, path: Path, settings: WorkerSettings, report: Report) -> ModelInfo:
    name, model = find_model(control, path, settings)
    if model is None or model.state in (ModelState.CONFIGURED, ModelState.FAILED):
        return _ask(control, name, path, settings, model, report)
    return model


def _ask(
    control: ControlApi, name: str, path: Path, settings: WorkerSettings, model: ModelInfo | None, report: Report
) -> ModelInfo:
    known = model is not None and model.configured
    what = "its configuration names it" if known else str(path)
    report(f"syshaxd does not hold model {name} yet: asking it to load ({what})")
    fields = {"name": name, "path": None if known else os.path.realpath(path), "format": settings.format}
    request = LoadRequest.model_validate({key: value for key, value in fields.items() if value is not None})
    try:
        return control.post("/v1/models", request, ModelInfo)
    except (NotAllowedError, UnknownModelError) as error:
        raise type(error)(
            f"syshaxd does not hold model {name} and did not load it for this user: {error.message}",
            f"an administrator can run `syshaxctl load {os.path.realpath(path)} --name {name}`, or name it in the "
            f"daemon's configuration under [models.{name}]",
        ) from None


def _wait_until(
    done: Callable[[ModelInfo], bool], control: ControlApi, model: ModelInfo, report: Report, deadline: float
) -> ModelInfo:
    name, said = model.name, ""
    while not done(model):
        if model.state is ModelState.FAILED:
            raise ModelNotReadyError(
                f"syshaxd could not load model {name} from {model.path}: {model.reason}",
                "put that right, then start the worker again",
            )
        if model.state is ModelState.CONFIGURED:
            raise ModelNotReadyError(
                f"model {name} was unloaded", f"an administrator can load it: syshaxctl load --name {name}"
            )
        if time.monotonic() >= deadline:
            raise RequestTimeoutError(
                f"syshaxd has not got model {name} ready in time: it is {model.state.value}, {_progress(model)}",
                "look with `syshaxctl models`; SYSHAX_WORKER_LOAD_TIMEOUT_S sets how long a worker waits",
            )
        now = _progress(model)
        if now != said:
            report(f"syshaxd: model {name} is {model.state.value}: {now}")
            said = now
        time.sleep(0.25)
        model = control.get(f"/v1/models/{name}", ModelInfo)
    return model


def _progress(model: ModelInfo) -> str:
    """Steps of a tenth, so that a log gets at most about a dozen lines."""
    p = model.progress
    tenths = p.bytes_done * 10 // p.bytes_total if p.bytes_total else 0
    return f"{p.stage or 'starting'}, {tenths * 10} % of {p.bytes_total / 2**30:.2f} GiB"


def compare_fingerprint(model: ModelInfo, path: Path) -> str:
    """The checkpoint's fingerprint. Raises FingerprintError when the daemon's model was made from other experts."""
    own = own_fingerprint(path)
    if model.fingerprint and model.fingerprint != own:
        raise FingerprintError(
            f"the checkpoint {path} (fingerprint {own[:12]}) is not the one that syshaxd holds as {model.name} "
            f"({model.path}, fingerprint {model.fingerprint[:12]})",
            "serve the same checkpoint, or load this one under another name and name that with --syshax-model",
        )
    return own


def own_fingerprint(path: Path) -> str:
    """The checkpoint's fingerprint, taken again only when a file of it looks another: a worker that attaches again
    after a restart of the daemon is to lose no time. Raises CheckpointError."""
    try:
        seen = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir())
    except OSError:
        seen = []
    return _fingerprint(path, tuple(seen))


@functools.lru_cache(maxsize=2)
def _fingerprint(path: Path, seen: tuple[tuple[str, int, int], ...]) -> str:
    return expert_fingerprint(Checkpoint(path))


def checkpoint_directory(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """MODEL as a directory: itself, or the snapshot of a Hugging Face repository (downloaded where it is not cached,
    as vLLM would). Raises CheckpointError."""
    directory = Path(model)
    if directory.is_dir():
        return directory
    if model.startswith(("/", ".", "~")):
        raise CheckpointError(f"{model} is not a directory", "give a checkpoint directory or a repository's name")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache, allow_patterns=["*.json", "*.safetensors"])
        )
    except Exception as error:  # noqa: BLE001  (the hub's errors have no common base that names them)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{model} is no directory, and no repository that can be had: {reason}",
            "give the path of a checkpoint directory",
        ) from None


def compare_geometry(geometry: Geometry, worker: Mapping[str, Any], name: str) -> None:
    """Raises FingerprintError with both values for the first size that differs."""
    for key, value in worker.items():
        held = getattr(geometry, key)
        if held != value:
            raise FingerprintError(
                f"model {name} in syshaxd has {key} {held}, this worker's model has {value}",
                "the daemon holds another model under this name",
            )
