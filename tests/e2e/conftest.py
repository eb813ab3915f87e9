"""Fixtures of the end-to-end tests: real syshaxd, real vLLM, checkpoints and transformers' answers to compare with.

Everything starts in a private runtime directory as the user who runs the tests. Starting vLLM takes tens of seconds,
so tests share engines (see engine.py) where they do not spoil each other's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from models import SHAPES, write_checkpoint
from services import AMOUNTS, HERE, Daemon, EngineProcess, amount


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint("mixtral"): the directory of that shape of tests/models.py, made once."""
    base = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        path = base / name
        return path if path.exists() else write_checkpoint(SHAPES[name], path)

    return make


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """reference("mixtral"): transformers' greedy tokens in float32, computed once."""
    known: dict[str, list[list[int]]] = {}

    def compute(names: list[str]) -> None:
        """Of models with the same amount, in one process: its imports take longer than the small ones' tokens."""
        prompts, new_tokens = amount(names[0])
        command = [sys.executable, str(HERE / "reference.py"), str(len(prompts)), str(new_tokens)]
        command += [str(checkpoint(name)) for name in names]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        for name, answer in zip(names, json.loads(done.stdout), strict=True):
            assert answer["margin"] > 1e-3, f"{name}: two best logits lie too near each other to compare tokens"
            known[name] = answer["tokens"]

    def tokens(name: str) -> list[list[int]]:
        if name not in known:
            compute([name] if name in AMOUNTS else [other for other in SHAPES if other not in AMOUNTS])
        return known[name]

    return tokens


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("daemon"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def engine(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A process with vLLM imported, for several models one after another."""
    made = EngineProcess(tmp_path_factory.mktemp("engine") / "log", {"SYSHAX_RUNTIME_DIR": str(daemon.runtime_dir)})
    yield made
    made.end()
