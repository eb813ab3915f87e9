"""Vendor libraries: a good one joins the table and computes; every kind of bad one is refused by name, and leaves the
table as it was. Each library is loaded in a process of its own, since a table never shrinks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compile import HERE, compile_library

from syshaxd import _core

PROGRAM = """
import json, sys
import numpy as np
from syshaxd import _core
before = _core.kernels()
try:
    _core.load_operator_library(sys.argv[1])
except _core.CoreError as error:
    print(json.dumps({"code": error.code, "message": str(error), "same": before == _core.kernels()}))
    sys.exit()
_core.load_operator_library(sys.argv[1])
added = [kernel for kernel in _core.kernels() if kernel not in before]
rng = np.random.default_rng(0)
w = rng.integers(-128, 128, (37, 96)).astype(np.float32) / 16
x = rng.integers(-8, 9, (5, 96)).astype(np.float32)
blocks = _core.encode("ex16", w)
y = _core.run_kernel("ex16_f32_example", blocks, 37, 96, x)
inverse = np.array_equal(_core.pack_unpack("ex16_f32_example", blocks, 37, 96), blocks)
print(json.dumps({
    "added": added, "equal": np.array_equal(y, x @ w.T), "inverse": inverse, "formats": _core.formats(),
    "chosen": _core.select_kernel("ex16", "bfloat16"), "builtin": _core.select_kernel("q8_0", "float32"),
}))
"""


def load(library: str | Path) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.cache.mkdir("vendor")


def test_a_good_library_joins_the_table_and_computes(folder: Path) -> None:
    told = load(compile_library(HERE / "vendor/example.c", folder, "-xc++"))
    [row] = told["added"]  # loading it twice adds it once
    assert (row["name"], row["format"], row["vendor"], row["usable"]) == ("ex16_f32_example", "ex16", "example", True)
    assert told["equal"] and told["inverse"]
    assert told["formats"] == [*_core.formats(), "ex16"]
    assert told["chosen"] == "ex16_f32_example"
    assert told["builtin"] == _core.select_kernel("q8_0", "float32")


MISTAKES = {
    1: "formats[0]: abi is 2, this daemon speaks 1",
    2: 'is for unknown format "ex9"',
    3: "packs format q8_0 as ex16/rows/1, but that format's packing is q8_0/p16k4/1",
    4: "kernels[0].packing.panel_rows is 32, this daemon takes 16",
    5: "kernels[0].packing.panel_bytes(64) is 2049, it must be a multiple of 64",
    6: "kernels[0]: struct_size is 8",
    7: 'kernel "q8_0_q8_scalar" exists already',
    8: "kernels[0].dtypes is 0",
    9: "kernels[0].run is NULL",
    10: "it exports no function syshax_operators_v1",
    11: "its table is NULL",
    12: "formats[0].block_values is 0 (a block is a row), so .row_bytes must not be NULL",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_bad_library_is_refused_by_name(folder: Path, mistake: int) -> None:
    library = compile_library(HERE / "vendor/example.c", folder, "-xc++", "-O0", f"-DBREAK={mistake}")
    told = load(library)
    assert told["code"] == "config" and told["same"]
    assert str(library) in told["message"] and MISTAKES[mistake] in told["message"]


REPLACES = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from core_models import geometry, plan, random_layer
from syshaxd import _core
shape = geometry(128, 192, experts=2)
weights, rng = random_layer(shape, 3), np.random.default_rng(4)
x, ids = rng.standard_normal((5, 128)).astype(np.float32), np.tile(np.array([1, 0], np.int32), (5, 1))
runtime, outputs, kernels = _core.Runtime(plan([1])), [], []
for name in ("before", "after"):
    model = runtime.create_model(name, shape, "bf16")
    model.load_layer(0, *weights, "float32")
    model.seal()
    outputs.append(model.forward(0, x, ids, np.full((5, 2), 0.5, np.float32), "float32"))
    kernels.append(model.kernels()["float32"])
    if name == "before":
        _core.load_operator_library(sys.argv[1])
assert kernels[1] == "bf16_f32_vendor" != kernels[0], kernels
assert np.array_equal(outputs[0], outputs[1])
print("replaced")
"""


def test_a_kernel_of_higher_rank_takes_the_built_in_ones_place(folder: Path) -> None:
    library = compile_library(HERE / "vendor/replacement.c", folder, "-xc++")
    command = [sys.executable, "-c", REPLACES, str(library), str(HERE.parent / "core")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "replaced"), done.stderr


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    for path in (text, tmp_path / "absent.so"):
        told = load(path)
        assert told["code"] == "config" and str(path) in told["message"] and "cannot be loaded" in told["message"]
