"""The checks that a vendor's library is put through (`syshaxd operators check`), over every built-in format and kernel;
and that they find what they are there to find, over libraries that each make one mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compile import HERE, compile_library

from syshaxd import _core
from syshaxd.operators import checking

CHECKS = _core.operator_checks()


@pytest.mark.parametrize("check", CHECKS["format"])
@pytest.mark.parametrize("format", _core.formats())
def test_every_format(format: str, check: str) -> None:
    passed, text = _core.check_operator("format", format, check)
    assert passed, text


@pytest.mark.parametrize("check", CHECKS["kernel"])
def test_every_kernel(row, check: str) -> None:
    passed, text = row.core.check_operator("kernel", row.name, check)
    assert passed, text


def test_integer_rows_are_compared_with_their_scalar_row() -> None:
    for kernel in _core.kernels():
        if kernel["usable"] and kernel["activation"] == "q8":
            _, text = _core.check_operator("kernel", kernel["name"], "scalar")
            scalar = f"{kernel['format']}_q8_scalar"
            assert text == ("is the scalar kernel" if kernel["name"] == scalar else f"the bits of {scalar}")


def test_what_there_is_not_to_check() -> None:
    for arguments in (("format", "bf16", "taste"), ("kernel", "bf16_f32_scalar", "taste"), ("format", "q9", "zeros"),
                      ("kernel", "q9_f32_scalar", "zeros"), ("library", "bf16", "zeros")):  # fmt: skip
        with pytest.raises(_core.CoreError) as caught:
            _core.check_operator(*arguments)
        assert caught.value.code == "invalid_argument"


def check_library(library: Path) -> tuple[int, list[dict[str, str]]]:
    command = [sys.executable, "-m", "syshaxd", "operators", "check", str(library), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


MISTAKES = {
    20: ("ex16", "non-numbers", "decodes to"),
    21: ("ex16_f32_example", "tokens", "token 0, row 0"),
    22: ("ex16_f32_example", "batch", "depends on its batch"),
    23: ("ex16_f32_example", "tokens", "run writes behind a token's outputs"),
    24: ("ex16_f32_example", "activations", "SIGSEGV"),
    25: ("ex16_f32_example", "packing", "unpack does not give back"),
    26: ("ex16_f32_example", "packing", "leaves bytes of a panel unwritten"),
    27: ("ex16_f32_example", "ranges", "packed in ranges of 64 differs"),
    28: ("ex16_f32_example", "threads", "depends on other threads"),
    29: ("ex16_f32_example", "non-numbers", "in a token gives a number"),
    30: ("ex16_f32_example", "inputs", "run changes the weights"),
}


@pytest.fixture
def folder(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.cache.mkdir("vendor")


def test_the_smallest_library_passes(folder: Path) -> None:
    code, records = check_library(compile_library(HERE / "vendor/example.c", folder, "-xc++"))
    assert code == 0, [record for record in records if record["state"] == "failed"]
    assert records[0]["check"] == "load" and {record["state"] for record in records} == {"passed"}
    assert {record["check"] for record in records} == {"load", *CHECKS["format"], *CHECKS["kernel"]}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(folder: Path, mistake: int) -> None:
    code, records = check_library(compile_library(HERE / "vendor/example.c", folder, "-xc++", f"-DBREAK={mistake}"))
    row, check, words = MISTAKES[mistake]
    [found] = [record for record in records if (record["row"], record["check"]) == (row, check)]
    assert code == 1 and found["state"] == "failed" and words in found["text"]


def test_a_library_that_hangs_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "HANGS_SECONDS", 3.0)
    library = compile_library(HERE / "vendor/example.c", folder, "-xc++", "-DBREAK=31")
    *_, last = checking.check_library(library)
    assert (last["row"], last["check"], last["state"]) == ("ex16_f32_example", "activations", "failed")
    assert last["text"] == "did not end within 3 s"


def test_a_library_that_is_refused_fails_its_first_check(folder: Path, tmp_path: Path) -> None:
    code, [record] = check_library(compile_library(HERE / "vendor/example.c", folder, "-xc++", "-O0", "-DBREAK=1"))
    assert code == 1 and record["check"] == "load" and "abi is 2" in record["text"]
    code, [record] = check_library(tmp_path / "absent.so")
    assert code == 1 and "absent.so: No such file" in record["text"]
