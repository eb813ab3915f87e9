"""The cores that kernel tests run on: the installed one, and one whose AVX-512 and AMX are software, so that those
kernels are tested on CPUs that lack them."""

import importlib.util
import platform
from types import ModuleType

import pytest
from compile import compile_emulated_core

from syshaxd import _core

X86 = platform.machine() == "x86_64"
_loaded: dict[str, ModuleType] = {"native": _core}


class Row:
    """One row of the kernel table on one core."""

    def __init__(self, core: str, kernel: dict) -> None:
        self.core_name = core
        self.kernel = kernel
        self.name, self.format, self.activation = kernel["name"], kernel["format"], kernel["activation"]

    def __str__(self) -> str:
        return f"{self.name}-{self.core_name}"

    @property
    def core(self) -> ModuleType:
        return _loaded[self.core_name]


def kernel_rows() -> list[Row]:
    """Every row that can run here."""
    rows = [Row("native", kernel) for kernel in _core.kernels() if kernel["usable"]]
    return rows + [Row("emulated", k) for k in _core.kernels() if k["isa"].startswith("avx512") or k["isa"] == "amx"]


class VectorTable:
    """The element-wise operations of one ISA on one core; called with an operation's name and arguments."""

    def __init__(self, core: str, isa: str) -> None:
        self.core_name, self.isa = core, isa

    def __str__(self) -> str:
        return f"{self.isa}-{self.core_name}"

    def __call__(self, *args):
        return _loaded[self.core_name].vector_op(self.isa, *args)


def vector_tables() -> list[VectorTable]:
    """Every table that can run here."""
    tables = [VectorTable("native", isa) for isa in _core.vector_isas()]
    return tables + ([VectorTable("emulated", "avx512")] if X86 else [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", kernel_rows(), ids=str)
    if "vector" in metafunc.fixturenames:
        metafunc.parametrize("vector", vector_tables(), ids=str)


@pytest.fixture(scope="session", autouse=X86)
def emulated_core(pytestconfig: pytest.Config) -> ModuleType:
    module = compile_emulated_core(pytestconfig.cache.mkdir("emulated"))
    spec = importlib.util.spec_from_file_location("_core_emulated", module)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    _loaded["emulated"] = loaded
    return loaded
