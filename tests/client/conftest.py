"""A small attach server for the client's tests, and a directory whose socket paths are short enough."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ring_harness import FakeDaemon

from syshax import Client, Model


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="syshax-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(runtime_dir) as daemon:
        yield daemon


@pytest.fixture
def client(runtime_dir: Path) -> Iterator[Client]:
    with Client(runtime_dir) as client:
        yield client


@pytest.fixture
def model(daemon: FakeDaemon, client: Client) -> Iterator[Model]:
    with client.open("tiny", max_tokens=16) as model:
        yield model
