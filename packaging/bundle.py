"""Copies the Python packages that syshax needs into a private directory, with their licences, without any network.

    PYTHON packaging/bundle.py copy TARGET      PYTHON: of the environment that has them installed
    PYTHON packaging/bundle.py list             a line for each: name, version, licence

What is needed comes from one place, `dependencies` in pyproject.toml, and all that those need in turn; extras are left
out. Each package brings what its own record lists, less its scripts, its tests and its byte code. The service then
depends on nothing but Python itself, so it installs where only the distribution's own repositories can be reached.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path, PurePosixPath

from third_party import licence_of

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "entry_points.txt"}
"""Of a dist-info directory: true of the environment that it was installed into, not of the copy."""
FOLDERS_LEFT_OUT = {"tests", "_pyinstaller", "f2py", "include"}
SUFFIXES_LEFT_OUT = {".a", ".c", ".h", ".pxd", ".pxi", ".pyx"}


def dependencies() -> list[str]:
    needed: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return needed


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> list[metadata.Distribution]:
    """The distributions that these need, and theirs, by name. SystemExit names one that is missing or too old."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(text, "syshax") for text in requirements]
    while waiting:
        text, wanted_by = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonical(requirement.name)
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise SystemExit(
                f"bundle: {requirement}, needed by {wanted_by}, is not installed for {sys.executable}"
            ) from None
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise SystemExit(f"bundle: {wanted_by} needs {requirement}, {sys.executable} has {distribution.version}")
        found[name] = distribution
        waiting += [(needed, name) for needed in distribution.requires or []]
    return [found[name] for name in sorted(found)]


def belongs(path: PurePosixPath) -> bool:
    """Whether a file of a package's record is copied."""
    if path.is_absolute() or ".." in path.parts or "__pycache__" in path.parts:
        return False
    if path.parts[0].endswith(".dist-info"):
        return path.name not in LEFT_OUT
    return not FOLDERS_LEFT_OUT & set(path.parts[:-1]) and path.suffix not in SUFFIXES_LEFT_OUT


def copy(distribution: metadata.Distribution, target: Path) -> int:
    count = 0
    for file in distribution.files or ():
        if not belongs(PurePosixPath(file)):
            continue
        source, destination = Path(str(distribution.locate_file(file))), target / file
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)
        destination.chmod(0o755 if ".so" in source.name else 0o644)
        count += 1
    if not count:
        raise SystemExit(f"bundle: {distribution.metadata['Name']} has no record of its files")
    return count


def main() -> int:
    match sys.argv[1:]:
        case ["list"]:
            for distribution in closure(dependencies()):
                name = distribution.metadata["Name"]
                print(f"{canonical(name)} {distribution.version} {licence_of(name)}")
        case ["copy", target]:
            for distribution in closure(dependencies()):
                copy(distribution, Path(target))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
