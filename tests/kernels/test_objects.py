"""packaging/check_objects.py finds what it is there for, in objects made to be wrong."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from compile import CXX

CHECK = Path(__file__).parents[2] / "packaging" / "check_objects.py"
LOOP = "void scale(float* x) { for (int i = 0; i < 64; ++i) x[i] *= 3; }\n"
INLINE = "inline float twice(float x) { return x * 2; }\nfloat (*address)(float) = twice;\n"


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, CHECK, folder], capture_output=True, text=True, check=False)


def compile_object(folder: Path, name: str, source: str, *flags: str) -> None:
    path = folder / name
    path.write_text(source)
    subprocess.run([CXX, "-O3", *flags, "-c", path, "-o", folder / f"{name}.o"], check=True)


def test_objects_that_say_what_they_need_are_fine(tmp_path: Path) -> None:
    compile_object(tmp_path, "loop_scalar.cc", LOOP)
    compile_object(tmp_path, "loop_avx2.cc" if platform.machine() == "x86_64" else "loop_neon.cc", LOOP)
    done = check(tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("name", "flags", "need"),
    [
        ("loop.cc", ["-mavx2"], "avx2"),
        ("loop_avx2.cc", ["-mavx512f", "-mprefer-vector-width=512"], "avx512"),
        ("loop_scalar.cc", ["-mavx512f", "-mprefer-vector-width=512"], "avx512"),
    ]
    if platform.machine() == "x86_64"
    else [("loop_neon.cc", ["-march=armv8.2-a+sve"], "sve")],
)
def test_a_wrong_instruction_is_named(tmp_path: Path, name: str, flags: list[str], need: str) -> None:
    compile_object(tmp_path, name, LOOP, *flags)
    compile_object(tmp_path, "empty_avx2.cc", "")
    done = check(tmp_path)
    assert done.returncode == 1 and f"{name}.o: needs {need}, which its name does not say" in done.stdout
    assert "scale" in done.stdout


def test_a_weak_function_in_a_file_of_an_isa_is_named(tmp_path: Path) -> None:
    compile_object(tmp_path, "part_avx2.cc", INLINE)
    compile_object(tmp_path, "part.cc", INLINE)
    done = check(tmp_path)
    assert done.returncode == 1 and done.stdout.count("\n") == 1
    assert "part_avx2.cc.o: defines the weak function _Z5twicef" in done.stdout


def test_nothing_to_check_is_a_fault(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 1 and "build there first" in done.stderr
