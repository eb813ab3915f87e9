"""The example operator library, csrc/examples/int8row: it builds against the headers alone, passes every check on every
ISA, and whole layers computed with it are right on any plan. Each use is in a process of its own, since a table never
shrinks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from compile import CSRC, compile_example

from syshaxd import _core


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.cache.mkdir("vendor")


def run(code: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_builds_as_its_own_file_says_and_passes_every_check(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    assert cmake, "cmake is among the tools that build the core"
    include = tmp_path / "include"
    shutil.copytree(CSRC / "include/syshax", include / "syshax")
    source, build = tmp_path / "int8row", tmp_path / "build"
    shutil.copytree(CSRC / "examples/int8row", source)
    for command in ([cmake, "-S", source, "-B", build, f"-DSYSHAX_INCLUDE={include}"], [cmake, "--build", build]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
    command = [sys.executable, "-m", "syshaxd", "operators", "check", str(build / "libint8row.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout
    assert "the bits of int8row_q8token_scalar" in done.stdout or _core.isa_effective() == "scalar"


CHECK_ALL = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_core_emulated", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
core.load_operator_library(sys.argv[2])
row = "int8row_q8token_avx512vnni"
print(json.dumps({check: core.check_operator("kernel", row, check) for check in core.operator_checks()["kernel"]}))
"""


if "avx2" in _core.isa_names():  # x86 alone has this row

    def test_the_avx512_row_in_software(emulated_core: ModuleType, folder: Path) -> None:
        assert emulated_core.__file__
        results = json.loads(run(CHECK_ALL, emulated_core.__file__, compile_example(folder, emulated=True)))
        assert all(passed for passed, _ in results.values()), results
        assert results["scalar"][1] == "the bits of int8row_q8token_scalar"


LAYERS = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from core_models import geometry, plan, random_layer
from syshaxd import _core
_core.load_operator_library(sys.argv[1])
rng = np.random.default_rng(0)

def row_quantised(w):
    d = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    return np.clip(np.rint(w / np.where(d > 0, d, 1)), -127, 127) * d.astype(np.float64)

def expected(weights, x, ids, scales, cuts):
    out = np.zeros(x.shape)
    for token in range(len(x)):
        for expert, scale in zip(ids[token], scales[token]):
            gate, up, down = (matrix[expert] for matrix in weights)
            for first, last in cuts:  # each node has its own scales for its part
                a = row_quantised(x[token : token + 1])
                g, u = a @ row_quantised(gate[first:last]).T, a @ row_quantised(up[first:last]).T
                h = (g / (1 + np.exp(-g)) * u).astype(np.float32)
                out[token] += scale * (row_quantised(h) @ row_quantised(down[:, first:last]).T)[0]
    return out

results = {}
for hidden, inner in ((64, 128), (200, 192)):
    shape = geometry(hidden, inner, experts=3)
    weights = random_layer(shape, 1)
    for name, threads in (("one", [1]), ("two", [2]), ("nodes", [1, 1])):
        runtime = _core.Runtime(plan(threads))
        model = runtime.create_model("m", shape, "int8row")
        model.load_layer(0, *weights, "float32")
        model.seal()
        half = -(-inner // 64 // 2) * 64
        cuts = [(0, half), (half, inner)] if name == "nodes" else [(0, inner)]
        for tokens in (1, 7, 70):
            if name == "one":
                x = rng.standard_normal((tokens, hidden)).astype(np.float32)
                ids = np.stack([rng.permutation(3)[:2] for _ in range(tokens)]).astype(np.int32)
            else:
                x, ids, _ = results[hidden, tokens]
            scales = np.full((tokens, 2), 0.5, np.float32)
            y = model.forward(0, x, ids, scales, "float32")
            want = expected(weights, x, ids, scales, cuts)
            error = np.abs(y - want).max() / np.abs(want).max()
            # now and then a value rounds to its other neighbour
            assert error < 5e-3, (hidden, inner, name, tokens, error)
            if name == "one":
                results[hidden, tokens] = x, ids, y
            if name == "two":
                assert np.array_equal(y, results[hidden, tokens][2])
            poisoned = x.copy()
            poisoned[0, 3] = np.nan
            z = model.forward(0, poisoned, ids, scales, "float32")
            assert np.isnan(z[0]).all() and np.array_equal(z[1:], y[1:])
        del model, runtime
print("right")
"""


def test_whole_layers_with_threads_and_nodes(folder: Path) -> None:
    core_tests = Path(__file__).parents[1] / "core"
    assert run(LAYERS, compile_example(folder), core_tests).strip() == "right"
