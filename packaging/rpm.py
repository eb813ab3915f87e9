"""Builds the RPMs: the source tarball, the Python packages that are bundled and built with, then rpmbuild.

    .venv/bin/python packaging/rpm.py TOPDIR [--sources-only] [--release N] [--core DIR] [--python PATH] [--no-check]

TOPDIR/SOURCES gets syshax-VERSION.tar.gz (the files that git knows, as they are) and
syshax-environment-VERSION-ARCH.tar.gz (copies of installed packages: what syshax needs, and beside it the tools of
build and %check); TOPDIR/SPECS gets syshax.spec; TOPDIR/RPMS the packages. Nothing is fetched: the Python packages are
those that the tests ran with. Sources that are there already are kept, so that two releases have the same.

Debian's rpm lacks the macros of openEuler's and knows nothing of Debian's packages; there
packaging/rpm_macros_for_debian stands in and build requirements are not checked.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path, PurePosixPath

from bundle import closure, dependencies

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["hypothesis", "packaging", "pybind11", "pytest", "pytest-asyncio", "pytest-timeout", "setuptools", "wheel"]


def version() -> str:
    project: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["version"]


def source_tarball(path: Path, prefix: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
            if (ROOT / name).is_file():
                tar.add(ROOT / name, f"{prefix}/{name}", filter=_ours)


def _ours(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def environment_tarball(path: Path) -> None:
    """Every file of each package's record but scripts and byte code, below environment/."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for distribution in closure([*dependencies(), *TOOLS]):
            for file in distribution.files or ():
                name = PurePosixPath(file)
                if name.is_absolute() or ".." in name.parts or "__pycache__" in name.parts:
                    continue
                data = Path(str(distribution.locate_file(file))).read_bytes()
                member = tarfile.TarInfo(f"environment/{name}")
                member.size = len(data)
                member.mode = 0o755 if ".so" in name.name else 0o644
                tar.addfile(member, io.BytesIO(data))


def sources(top: Path) -> None:
    """Writes SOURCES and SPECS below TOPDIR."""
    for folder in ("SOURCES", "SPECS"):
        (top / folder).mkdir(parents=True, exist_ok=True)
    name = f"syshax-{version()}"
    for path, make in (
        (top / "SOURCES" / f"{name}.tar.gz", lambda path: source_tarball(path, name)),
        (top / "SOURCES" / f"syshax-environment-{version()}-{platform.machine()}.tar.gz", environment_tarball),
    ):
        if not path.exists():
            make(path)
    shutil.copy(ROOT / "packaging/syshax.spec", top / "SPECS")


def rpmbuild(top: Path, release: int, core: Path | None, python: str, check: bool) -> None:
    """Runs rpmbuild over what `sources` wrote. Raises CalledProcessError."""
    command = ["rpmbuild", "-bb", "--define", f"_topdir {top}", "--define", f"rel {release}"]
    if not Path("/usr/lib/rpm/macros.d/macros.systemd").exists():
        command += ["--nodeps", "--load", str(ROOT / "packaging/rpm_macros_for_debian")]
        command += ["--define", f"_dbpath {top}/rpmdb"]
    command += ["--define", f"__python3 {python}", "--define", "_smp_mflags -j" + os.environ.get("JOBS", "2")]
    command += ["--define", f"syshax_core {core.resolve()}"] if core else []
    command += [] if check else ["--nocheck"]
    # Code of the build's own environment is found by PYTHONPATH; another one's must not come first.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*command, str(top / "SPECS/syshax.spec")], check=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").partition("\n\n")[2].partition("\n\n")[0].strip())
    parser.add_argument("top", type=Path)
    parser.add_argument("--sources-only", action="store_true")
    parser.add_argument("--release", type=int, default=1)
    parser.add_argument("--core", type=Path)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--no-check", action="store_true")
    given = parser.parse_args()
    top = given.top.resolve()
    sources(top)
    if given.sources_only:
        return 0
    if shutil.which("rpmbuild") is None:
        print("error: there is no rpmbuild\nhint: install rpm-build (Debian: rpm)", file=sys.stderr)
        return 1
    try:
        rpmbuild(top, given.release, given.core, given.python, not given.no_check)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
