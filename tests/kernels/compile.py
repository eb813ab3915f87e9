"""Compiles small test libraries with the system's compiler, each once per content of its sources."""

import hashlib
import os
import platform
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
CXX = os.environ.get("CXX", "c++")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", f"-I{CSRC}", f"-I{CSRC}/include"]
EMULATED = ("AVX512", "AVX512VNNI", "AVX512BF16", "AMX_INT8", "AMX_BF16")
X86 = platform.machine() == "x86_64"
ARM = ("_neon", "_dotprod", "_i8mm", "_armbf16")
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(source: Path, folder: Path, *flags: str) -> Path:
    """One shared library from one C or C++ file."""
    name = hashlib.sha256(source.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    library = folder / f"{source.stem}-{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _run([CXX, *FLAGS, *flags, "-shared", str(source), "-o", str(library)])
    return library


def compile_example(folder: Path, *, emulated: bool = False) -> Path:
    """The example operator library, against the installed headers alone; `emulated`: its AVX-512 in software."""
    sources = sorted((CSRC / "examples/int8row").glob("*.cc" if X86 else "int8row.cc"))
    headers = [*(CSRC / "examples/int8row").glob("*.h"), *(CSRC / "include/syshax").glob("*.h")]
    work = folder / f"int8row-{emulated}-{_digest([*sources, *headers, HERE / 'emulated/immintrin.h', Path(__file__)])}"
    library = work / "libint8row.so"
    if library.exists():
        return library
    work.mkdir(parents=True)
    objects = []
    for source in sources:
        software = [f"-I{HERE / 'emulated'}", "-march=native", "-Wno-psabi", "-DINT8ROW_STAYS(x)="]
        flags = {"avx2": ["-mavx2"], "avx512vnni": software if emulated else ["-mavx512f", "-mavx512vnni", "-w"]}
        output = work / f"{source.stem}.o"
        common = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", f"-I{CSRC}/include"]
        _run([CXX, *common, *flags.get(source.stem.rpartition("_")[2], []), "-c", str(source), "-o", str(output)])
        objects.append(str(output))
    _run([CXX, "-shared", *objects, "-o", str(library)])
    return library


def _flags_for(source: Path) -> list[str]:
    """What is tested is optimised a little; the rest is only there to hold it."""
    if source.stem.endswith("_avx2"):
        return [*AVX2, "-O0"]
    if "_avx512" in source.stem or source.stem.endswith(
        "_amx"
    ):  # the CPU's own instructions may serve the software version
        return [f"-I{HERE / 'emulated'}", "-O1", "-march=native", "-Wno-psabi"]
    if source.stem.startswith("conformance"):  # loops over every product
        return ["-O1"]
    return ["-O0"]


def compile_emulated_core(folder: Path) -> Path:
    """The extension module _core_emulated: kernels and formats, AVX-512 in software."""
    sources = [*CSRC.glob("format/*.cc"), *CSRC.glob("kernels/*.cc"), CSRC / "base/cpu_features.cc"]
    sources = [path for path in sources if not path.stem.endswith(ARM)] + [HERE / "emulated/module.cc"]
    headers = [
        path for folder in ("base", "format", "kernels", "include/syshax") for path in CSRC.glob(f"{folder}/*.h")
    ]
    headers += [CSRC / "bindings/kernels.cc", CSRC / "bindings/bindings.h", CSRC / "kernels/kernels.inc"]
    headers += [HERE / "emulated/immintrin.h", Path(__file__)]
    work = folder / _digest(sources + headers)
    module = work / "_core_emulated.so"
    if module.exists():
        return module
    work.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
    features = "|".join(f"SYSHAX_CPU_{name}" for name in EMULATED)
    define = f"-DSYSHAX_EMULATED_FEATURES=({features})"

    def one(source: Path) -> str:
        output = work / f"{source.parent.name}-{source.stem}.o"
        _run([CXX, *FLAGS, *includes, define, *_flags_for(source), "-c", str(source), "-o", str(output)])
        return str(output)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(one, sources))
    _run([CXX, "-shared", *objects, "-ldl", "-o", str(module)])
    return module
