"""Maps source folders to import names and builds the C++ core with CMake.

One source tree gives two packages (daemon -> syshaxd, client -> syshax) and two libraries: syshaxd/_core (Python
extension) and syshax/libsyshax_client.so (plain C ABI). SYSHAX_CLIENT_ONLY=1 leaves the daemon and syshaxctl out, for
a worker's container: that wheel holds no code for a Python version, and needs little. SYSHAX_BUILD_DIR keeps the CMake
build between runs.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CLIENT_ONLY = os.environ.get("SYSHAX_CLIENT_ONLY", "") == "1"

CLIENT_NEEDS = {"numpy", "pydantic"}
"""Of pyproject.toml's dependencies; vLLM brings both."""


def packages_of(folder: str, name: str) -> list[str]:
    return [name] + [f"{name}.{package}" for package in find_packages(folder)]


class CMakeBuild(build_ext):
    """Runs CMake once and copies the libraries to where setuptools wants them."""

    def run(self) -> None:
        build = Path(os.environ.get("SYSHAX_BUILD_DIR", self.build_temp)).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT / "csrc"),
            "-B",
            str(build),
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DSYSHAX_CLIENT_ONLY={'ON' if CLIENT_ONLY else 'OFF'}",
        ]
        if not CLIENT_ONLY:
            import pybind11

            configure.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "-j", os.environ.get("SYSHAX_BUILD_JOBS", "2")], check=True)
        target = ROOT if self.inplace else Path(self.build_lib).resolve()
        client = target / ("client" if self.inplace else "syshax")
        daemon = target / ("daemon" if self.inplace else "syshaxd")
        self.copy_file(str(build / "libsyshax_client.so"), str(client / "libsyshax_client.so"))
        if not CLIENT_ONLY:
            for module in build.glob("_core*.so"):
                self.copy_file(str(module), str(daemon / module.name))

    def get_outputs(self) -> list[str]:
        return []


class ClientDistribution(Distribution):
    """Of what pyproject.toml says, the part that is true of the client alone."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        needed = [text for text in self.install_requires if re.split(r"[^\w-]", text)[0] in CLIENT_NEEDS]
        for where in (self, self.metadata):
            where.install_requires, where.extras_require = needed, {}
        scripts = self.entry_points["console_scripts"]
        self.entry_points["console_scripts"] = [row for row in scripts if "syshax.vllm" in row]


class ClientWheel(bdist_wheel):
    """For any Python 3 on this kind of machine: the C library is loaded with ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


packages = packages_of("client", "syshax")
if CLIENT_ONLY:
    packages = [package for package in packages if package != "syshax.ctl"]
else:
    packages += packages_of("daemon", "syshaxd")

client_only = {"distclass": ClientDistribution} if CLIENT_ONLY else {}

setup(
    packages=packages,
    package_dir={"syshax": "client", "syshaxd": "daemon"},
    package_data={"syshax": ["py.typed"], "syshaxd": ["py.typed", "*.pyi", "bench/targets.toml", "frontend/static/*"]},
    ext_modules=[Extension("syshax._client" if CLIENT_ONLY else "syshaxd._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild, **({"bdist_wheel": ClientWheel} if CLIENT_ONLY else {})},
    **client_only,
)
