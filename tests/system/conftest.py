"""One installation and one booted box for the tests of the units; the model they use, and whether answers are right.

These tests need root and systemd-nspawn, so `make system-test` alone collects them.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from box import Box, install
from checkpoints import STEMS, write_checkpoint
from moe_reference import moe

MODELS = "/srv/models"
CONFIG = f"""[models.tiny]
path = "{MODELS}/tiny"
format = "bf16"
autoload = true
"""
GEOMETRY = {"num_hidden_layers": 2, "num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 96}


class TinyModel:
    """A checkpoint whose answers can be checked against the slow reference."""

    def __init__(self, path: Path, geometry: dict[str, int] = GEOMETRY) -> None:
        self.path, self._count = path, geometry["num_experts"]
        self._tensors = write_checkpoint(path, **geometry)
        for file in [path, *path.iterdir()]:
            file.chmod(0o755 if file.is_dir() else 0o644)

    def _experts(self, layer: int) -> list[tuple[np.ndarray, ...]]:
        stem, names = STEMS["Qwen3MoeForCausalLM"]
        experts = range(self._count)
        return [tuple(self._tensors[f"{stem.format(layer, e)}{name}.weight"] for name in names) for e in experts]

    def check(self, answers: Path) -> int:
        """Every answer that inside_requests.py wrote lies within its bound; their number."""
        with np.load(answers) as rows:
            for layer, x, ids, weights, y in zip(
                *(rows[k] for k in ("layer", "x", "ids", "weights", "y")), strict=True
            ):
                expected = moe(x, ids, weights, self._experts(int(layer)), "f32", "float32")
                assert np.all(np.abs(y - expected.value) <= expected.error)
                assert np.abs(expected.value).max() > 100 * expected.error.max(), "the bound says something"
            return len(rows["y"])


@pytest.fixture(scope="session")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a package would install, with the tests' users and configuration: laid over a box's root."""
    layer = install(tmp_path_factory.mktemp("layer"))
    (layer / "etc/syshax/syshaxd.toml.d/models.toml").write_text(CONFIG)
    yield layer
    shutil.rmtree(layer)


@pytest.fixture(scope="session")
def tiny(layer: Path) -> TinyModel:
    return TinyModel(layer / MODELS.lstrip("/") / "tiny")


@pytest.fixture(scope="session")
def box(layer: Path, tiny: TinyModel) -> Iterator[Box]:
    """Shared: a test that changes a unit or the configuration puts it back."""
    with Box("syshax", layer) as box:
        yield box


class Answers:
    """Runs a client in the box and checks its answers."""

    def __init__(self, box: Box, model: TinyModel) -> None:
        self._box, self._model, self._numbers = box, model, itertools.count()

    def start(self, requests: int = 3, user: str = "alice", pause: float = 0.0) -> Running:
        out = f"/tmp/answers-{next(self._numbers)}.npz"
        words = ["tiny", out, "--requests", str(requests), "--pause", str(pause)]
        process = self._box.popen(*self._box.python("inside_requests.py", *words), user=user)
        return Running(self._box, self._model, out, process)

    def check(self, requests: int = 3, user: str = "alice") -> None:
        self.start(requests, user).check(requests)


class Running:
    """A client that has been started."""

    def __init__(self, box, model, out, process) -> None:  # type: ignore[no-untyped-def]
        self._box, self._model, self._out, self.process, self.pid = box, model, out, process, 0

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        said = []
        for text in self.process.stdout:
            said.append(text.strip())
            if text.startswith("pid "):
                self.pid = int(text.split()[1])
            if said[-1] == line:
                return
        raise AssertionError(f"the client ended before it said {line!r}: {said[-20:]}")

    def kill(self) -> None:
        """After wait_for."""
        self._box.run("kill", "-KILL", str(self.pid))
        self.process.communicate(timeout=30)

    def check(self, requests: int, timeout: float = 60) -> None:
        output, _ = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, output + self._box.journal()[-3000:]
        assert self._model.check(self._box.path(self._out)) == requests


@pytest.fixture
def answers(box: Box, tiny: TinyModel) -> Answers:
    return Answers(box, tiny)
