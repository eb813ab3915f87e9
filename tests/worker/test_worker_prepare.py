"""Getting the daemon ready, against a daemon that is a list of models: every state and every refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import Shape, write_checkpoint
from pydantic import BaseModel

from syshax.checkpoint import Checkpoint, expert_fingerprint
from syshax.errors import (
    CheckpointError,
    DaemonAbsentError,
    FingerprintError,
    ModelNotReadyError,
    NotAllowedError,
    RequestTimeoutError,
)
from syshax.protocol import Geometry, LoadRequest, ModelInfo, ModelsAnswer, ModelState, Progress
from syshax.vllm import prepare as prepare_module
from syshax.vllm.prepare import (
    ask_for_model,
    checkpoint_directory,
    compare_geometry,
    find_model,
    own_fingerprint,
    prepare,
    wait_for_daemon,
)
from syshax.vllm.settings import WorkerSettings

TINY = Shape("mixtral", layers=1, hidden=32, intermediate=32, experts=2)


class FakeControl:
    """Answers like the control API; `steps` are the states that a load goes through, one for each look."""

    def __init__(self, models: list[ModelInfo], steps: list[dict[str, Any]] | None = None) -> None:
        self.models = {model.name: model for model in models}
        self.steps = steps or []
        self.posted: list[LoadRequest] = []
        self.refuse: Exception | None = None
        self.absent = 0

    def get(self, path: str, answer: type[BaseModel]) -> Any:
        if self.absent:
            self.absent -= 1
            raise DaemonAbsentError("no syshaxd")
        if path == "/v1/models":
            return ModelsAnswer(boot_id="b", models=list(self.models.values()))
        if path == "/v1/status":
            return "status"
        name = path.removeprefix("/v1/models/")
        if self.steps:
            self.models[name] = self.models[name].model_copy(update=self.steps.pop(0))
        return self.models[name]

    def post(self, path: str, body: BaseModel | None, answer: type[BaseModel]) -> Any:
        assert path == "/v1/models" and isinstance(body, LoadRequest)
        self.posted.append(body)
        if self.refuse is not None:
            raise self.refuse
        known = self.models.get(body.name)
        made = info(body.name, body.path or (known.path if known else ""), ModelState.LOADING)
        self.models[body.name] = made
        return made


def info(name: str, path: str, state: ModelState, **more: Any) -> ModelInfo:
    return ModelInfo(name=name, path=path, format="bf16", state=state, **more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(TINY, tmp_path_factory.mktemp("prepare") / "tiny-model")


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def loading(done: int, total: int = 100) -> dict[str, Any]:
    return {"progress": Progress(stage="converting", bytes_done=done, bytes_total=total)}


def test_the_name_is_the_settings_then_the_paths_then_the_directorys(checkpoint: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    control = FakeControl([info("a", "/elsewhere", ModelState.READY), info("b", str(link), ModelState.READY)])
    assert find_model(control, checkpoint, WorkerSettings(model="a"))[0] == "a"
    assert find_model(control, checkpoint, WorkerSettings(model="new")) == ("new", None)
    assert find_model(control, checkpoint, WorkerSettings())[0] == "b"
    assert find_model(FakeControl([]), checkpoint, WorkerSettings()) == ("tiny-model", None)


def test_an_unknown_model_is_asked_for_by_path_and_waited_for(checkpoint: Path) -> None:
    ready = {"state": ModelState.READY, "fingerprint": expert_fingerprint(Checkpoint(checkpoint))}
    control = FakeControl([], [loading(0), loading(40), loading(41), ready])
    said: list[str] = []
    model = prepare(control, checkpoint, WorkerSettings(format="q8_0"), said.append, soon())
    assert model.state is ModelState.READY
    assert control.posted == [LoadRequest(name="tiny-model", path=str(checkpoint.resolve()), format="q8_0")]
    assert "does not hold model tiny-model yet" in said[0]
    assert sum("40 %" in line for line in said) == 1, "progress in steps of a tenth"


@pytest.mark.parametrize("state", [ModelState.CONFIGURED, ModelState.FAILED])
def test_a_configured_model_is_asked_for_by_name_alone(checkpoint: Path, state: ModelState) -> None:
    known = info("m", str(checkpoint), state, configured=True, reason="no memory")
    control = FakeControl([known], [{"state": ModelState.READY}])
    prepare(control, checkpoint, WorkerSettings(), lambda _: None, soon())
    assert control.posted == [LoadRequest(name="m")]


def test_a_ready_model_is_not_asked_for(checkpoint: Path) -> None:
    control = FakeControl([info("m", str(checkpoint), ModelState.READY)])
    prepare(control, checkpoint, WorkerSettings(), lambda _: None, soon())
    assert control.posted == []


def test_a_load_under_way_is_left_to_go_on(checkpoint: Path) -> None:
    control = FakeControl([], [loading(0), loading(1)])
    assert ask_for_model(control, checkpoint, WorkerSettings(), lambda _: None).state is ModelState.LOADING


@pytest.mark.parametrize("ask", [lambda c, p: prepare(c, p, WorkerSettings(), print, soon()),
                                 lambda c, p: ask_for_model(c, p, WorkerSettings(), print)])  # fmt: skip
def test_a_failed_load_is_told_with_its_reason(checkpoint: Path, ask: Callable[[Any, Path], Any]) -> None:
    control = FakeControl([], [{"state": ModelState.FAILED, "reason": "needs 8 GiB, 2 are free"}])
    with pytest.raises(ModelNotReadyError, match="needs 8 GiB, 2 are free"):
        ask(control, checkpoint)


def test_waiting_ends(checkpoint: Path) -> None:
    control = FakeControl([info("m", str(checkpoint), ModelState.LOADING)])
    with pytest.raises(RequestTimeoutError, match="loading"):
        prepare(control, checkpoint, WorkerSettings(), lambda _: None, soon(0.3))


def test_a_refusal_names_what_an_administrator_can_do(checkpoint: Path) -> None:
    control = FakeControl([])
    control.refuse = NotAllowedError("only administrators load paths")
    with pytest.raises(NotAllowedError) as refused:
        prepare(control, checkpoint, WorkerSettings(), lambda _: None, soon())
    assert f"syshaxctl load {checkpoint.resolve()} --name tiny-model" in refused.value.hint


def test_other_experts_under_the_same_name_are_refused(checkpoint: Path) -> None:
    control = FakeControl([info("m", "/other", ModelState.READY, fingerprint="0" * 64)])
    with pytest.raises(FingerprintError, match="000000000000"):
        prepare(control, checkpoint, WorkerSettings(model="m"), lambda _: None, soon())


def test_the_fingerprint_is_taken_again_only_when_a_file_changed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own_fingerprint(checkpoint)
    taken: list[Path] = []
    monkeypatch.setattr(prepare_module, "expert_fingerprint", lambda opened: taken.append(opened.path) or "another")
    assert own_fingerprint(checkpoint) == first and not taken
    (checkpoint / "config.json").touch()
    assert own_fingerprint(checkpoint) == "another" and taken == [checkpoint]
    (checkpoint / "config.json").touch()  # so that no later test is told "another"
    with pytest.raises(CheckpointError):
        own_fingerprint(checkpoint / "nowhere")


def test_the_daemon_is_waited_for_and_given_up() -> None:
    control = FakeControl([])
    control.absent = 2
    said: list[str] = []
    assert wait_for_daemon(control, 5.0, said.append) == "status"
    assert len(said) == 1
    control.absent = 10**6
    with pytest.raises(DaemonAbsentError):
        wait_for_daemon(control, 0.3, said.append)


def test_geometry_is_compared_size_by_size() -> None:
    held = Geometry(num_layers=2, num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, layer_ids=[0, 1])
    compare_geometry(held, {"num_experts": 8, "hidden_size": 64}, "m")
    with pytest.raises(FingerprintError, match=r"intermediate_size 32.*has 16"):
        compare_geometry(held, {"num_experts": 8, "intermediate_size": 16}, "m")


@pytest.mark.parametrize("model", ["/no/such/directory", "./nothing", "no-such-organisation/no-such-model"])
def test_a_checkpoint_that_does_not_exist(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=model.split("/")[-1]):
        checkpoint_directory(model)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert checkpoint_directory(str(tmp_path)) == tmp_path
