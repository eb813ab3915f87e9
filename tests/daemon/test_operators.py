"""Operator libraries in the daemon: who may have written them, what is refused and how it is told, and a request served
in a library's format, from a checkpoint to a client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from fake_core import CoreError, FakeCore
from test_real import Process, reference

from syshax import Client
from syshax.ctl import screens
from syshax.protocol import DoctorAnswer, KernelsAnswer, LoadRequest, ModelInfo, StatusAnswer
from syshaxd import loader
from syshaxd.operators.libraries import distrust, load_directory

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from compile import HERE, compile_example, compile_library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """root's own, as far as modes go."""
    made = tmp_path / "lib" / "operators"
    made.mkdir(parents=True, mode=0o755)
    return made


def file_in(folder: Path, name: str = "a.so", mode: int = 0o644) -> Path:
    path = folder / name
    path.write_bytes(b"")
    path.chmod(mode)
    return path


def test_what_only_its_owner_may_write_is_trusted(folder: Path) -> None:
    assert distrust(file_in(folder)) == "" == distrust(folder)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o777])
def test_a_file_that_others_may_write_is_not(folder: Path, mode: int) -> None:
    path = file_in(folder, mode=mode)
    assert f"others than its owner may write to {path}" in distrust(path)


def test_nor_one_under_a_directory_that_others_may_write(folder: Path) -> None:
    path = file_in(folder)
    for place in (folder, folder.parent):
        place.chmod(0o775)
        assert f"others than its owner may write to {place}" in distrust(path)
        place.chmod(0o755)


def test_the_sticky_bit_protects_what_lies_deeper(folder: Path) -> None:
    path = file_in(folder)
    folder.parent.chmod(0o1777)
    assert distrust(path) == ""
    folder.chmod(0o1777)  # anybody may put a file here
    assert f"others than its owner may write to {folder}" in distrust(path)


def test_a_link_is_what_it_points_to(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "open"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    link = folder / "link.so"
    link.symlink_to(file_in(elsewhere))
    assert f"others than its owner may write to {elsewhere}" in distrust(link)


def test_nor_one_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_in(folder)
    if os.geteuid() == 0:
        os.chown(path, 54321, -1)
        assert distrust(path) == f"{path} belongs to uid 54321, neither root nor the daemon's own user"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        assert "neither root nor the daemon's own user" in distrust(path)


class LibraryCore(FakeCore):
    """Loads files whose names begin with "good", each with one format."""

    def __init__(self) -> None:
        super().__init__()
        self.more: list[str] = []

    def formats(self) -> list[str]:
        return [*super().formats(), *self.more]

    def load_operator_library(self, path: str) -> None:
        if not Path(path).name.startswith("good"):
            raise CoreError("config", f"operator library {path}: its table is NULL")
        self.more.append(Path(path).stem)


def test_a_directory_is_loaded_by_name_and_what_is_refused_is_told(folder: Path) -> None:
    for name in ("good2.so", "good1.so", "bad.so", "good3.txt"):
        file_in(folder, name)
    file_in(folder, "good0.so", 0o666)
    core = LibraryCore()
    libraries = load_directory(core, str(folder))
    assert [(Path(library.path).name, library.loaded, library.formats) for library in libraries] == [
        ("bad.so", False, []), ("good0.so", False, []), ("good1.so", True, ["good1"]), ("good2.so", True, ["good2"]),
    ]  # fmt: skip
    assert "its table is NULL" in libraries[0].reason and "chmod go-w" in libraries[1].reason
    folder.chmod(0o777)
    [refused] = load_directory(LibraryCore(), str(folder))
    assert refused.path == str(folder) and not refused.loaded and "others than its owner" in refused.reason
    assert load_directory(core, str(folder / "absent")) == [] == load_directory(core, "")


async def test_a_daemon_starts_without_what_it_refuses(start: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    """A model in a refused library's format fails, with the reason; everything else goes on."""
    file_in(folder, "bad.so")
    write_checkpoint(tmp_path / "m")
    text = f'[operators]\ndirectory = "{folder}"\n'
    text += f'[models.lost]\npath = "{tmp_path / "m"}"\nformat = "bad8"\nautoload = true\n'
    text += f'[models.fine]\npath = "{tmp_path / "m"}"\nautoload = true\n'
    daemon = await start(text, core=LibraryCore())
    await daemon.until("fine", "ready")
    lost = await daemon.until("lost", "failed")
    assert "there is no format bad8" in lost["reason"]
    _, kernels = await daemon.json("GET", "/v1/kernels")
    [library] = kernels["libraries"]
    assert not library["loaded"] and "its table is NULL" in library["reason"]
    _, doctor = await daemon.json("GET", "/v1/doctor")
    assert [check["level"] for check in doctor["checks"] if check["name"] == "operators bad.so"] == ["warning"]
    _, status = await daemon.json("GET", "/v1/status")
    assert any("bad.so is refused" in warning for warning in status["warnings"])


async def test_a_format_that_nobody_has_is_refused_at_once(start: Callable[..., Any], folder: Path) -> None:
    daemon = await start(f'[operators]\ndirectory = "{folder}"\n', core=LibraryCore())
    status, body = await daemon.json("PATCH", "/v1/config", {"values": {"precision.default_format": "q8_1"}})
    assert status == 400 and "there is no format 'q8_1'" in body["error"]["message"]
    assert body["error"]["hint"] == "did you mean q8_0?"
    status, body = await daemon.json("POST", "/v1/models", {"name": "m", "path": "/m", "format": "q8_1"})
    assert status == 400 and "there is no format q8_1" in body["error"]["message"]


@pytest.fixture
def real(short_dir: Path, pytestconfig: pytest.Config) -> Iterator[Process]:
    """A daemon of the compiled core with the example library, one of another ABI version, and one open to others."""
    cache, folder = pytestconfig.cache.mkdir("vendor"), short_dir / "operators"
    folder.mkdir()
    shutil.copy(compile_example(cache), folder / "int8row.so")
    shutil.copy(compile_library(HERE / "vendor/example.c", cache, "-xc++", "-O0", "-DBREAK=1"), folder / "old.so")
    shutil.copy(compile_library(HERE / "vendor/example.c", cache, "-xc++"), folder / "open.so")
    for path in folder.iterdir():
        path.chmod(0o666 if path.name == "open.so" else 0o644)
    config = short_dir / "syshaxd.toml"
    config.write_text(f'[operators]\ndirectory = "{folder}"\n')
    daemon = Process(short_dir / "run", "--config", config)
    daemon.wait_ready()
    yield daemon
    if daemon.process.poll() is None:
        daemon.end()


def test_a_library_s_format_serves_requests(real: Process, tmp_path: Path) -> None:
    answer = real.control.get("/v1/kernels", KernelsAnswer)
    loaded, old, open_ = answer.libraries
    assert loaded.loaded and loaded.formats == ["int8row"] and "int8row_q8token_scalar" in loaded.kernels
    assert not old.loaded and "abi is 2, this daemon speaks 1" in old.reason
    assert not open_.loaded and "others than its owner may write" in open_.reason
    assert [kernel.vendor for kernel in answer.kernels if kernel.chosen_for and kernel.format == "int8row"] == [
        "syshax-example"
    ]
    screen = screens.kernels(answer)
    assert screen is not None
    assert real.control.get("/v1/status", StatusAnswer).state == "ready"
    names = {check.name: check.level for check in real.control.get("/v1/doctor", DoctorAnswer).checks}
    assert names["operators int8row.so"] == "ok" and names["operators old.so"] == "warning"

    tensors = write_checkpoint(tmp_path)
    blueprint = loader.inspect(tmp_path, "int8row")
    info = real.load("m", tmp_path, "int8row")
    assert info.format == "int8row" and all(name.startswith("int8row_q8token_") for name in info.kernels.values())
    random = np.random.default_rng(2)
    with Client(real.runtime_dir) as client:
        model = client.open("m")
        assert model.format == "int8row"
        for layer in range(2):
            rows = [blueprint.architecture.tensor_names(layer, expert) for expert in range(4)]
            experts = [tuple(tensors[f"{name}.weight"] for name in row) for row in rows]
            x = random.standard_normal((33, 64)).astype(np.float32)
            ids = random.permuted(np.tile(np.arange(4, dtype=np.int32), (33, 1)), axis=1)[:, :2].copy()
            weights = random.random((33, 2)).astype(np.float32)
            expected = reference(experts, x, ids, weights)
            error = np.abs(model.moe(layer, x, ids, weights) - expected).max() / np.abs(expected).max()
            assert error < 0.03, layer
    with pytest.raises(Exception, match="there is no format int9row"):
        real.control.post("/v1/models", LoadRequest(name="n", path=str(tmp_path), format="int9row"), ModelInfo)


def test_check_config_names_refused_libraries(folder: Path, tmp_path: Path) -> None:
    file_in(folder, "bad.so")
    config = tmp_path / "c.toml"
    config.write_text(f'[operators]\ndirectory = "{folder}"\n')
    command = [sys.executable, "-m", "syshaxd", "--check-config", "--config", str(config), "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("ok")
    assert f"warning: operator library {folder / 'bad.so'} is refused" in done.stderr
    assert "cannot be loaded" in done.stderr and "Traceback" not in done.stderr
