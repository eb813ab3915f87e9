"""Repositories of the RPMs for the tests of their life: two releases, and one package that stands for the base system.

Debian's own packages are not in the rpm database of a box, so `host` states what is really there: each requirement of
our packages must be met by a library, program or version that this machine has, or making it fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

from box import ROOT

HOST_SPEC = """Name: host
Version: 1
Release: 1
Summary: What this machine has outside the rpm database
License: MulanPSL-2.0
BuildArch: noarch
%description
Stands for the packages of another distribution.
%files
"""
PROGRAMS = {"cmake": "cmake", "gcc-c++": "g++"}
"""Packages that are required by name, and the program that shows that theirs is here."""
CHANGED = "\n# This comment is new in release 2.\n"


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return str(done.stdout)


def build(top: Path, release: int, *options: object) -> str:
    """packaging/rpm.py as `make rpm` calls it; the packages lie in TOP/RPMS. What rpmbuild said."""
    return run(sys.executable, ROOT / "packaging/rpm.py", top, "--release", release, *options, cwd="/")


def second_release(first: Path, top: Path) -> None:
    """The first release's sources with a changed configuration file, as TOP/SOURCES."""
    (top / "SOURCES").mkdir(parents=True)
    for archive in (first / "SOURCES").iterdir():
        (top / "SOURCES" / archive.name).hardlink_to(archive)
    (source,) = (top / "SOURCES").glob("syshax-[0-9]*.tar.gz")
    work = top / "work"
    with tarfile.open(source) as tar:
        tar.extractall(work, filter="tar")
    (folder,) = work.iterdir()
    for name in ("syshaxd.toml", "syshax-api.toml"):
        with (folder / "etc" / name).open("a") as file:
            file.write(CHANGED)
    source.unlink()
    run("tar", "-czf", source, "-C", work, folder.name)


def libraries_of(package: Path, folder: Path) -> None:
    """The compiled libraries of our own in a package of the daemon, as a core that packaging/rpm.py takes."""
    archive = folder / "package.tgz"
    with package.open("rb") as source, archive.open("wb") as out:
        subprocess.run(["rpm2archive", "-"], stdin=source, stdout=out, check=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if "/syshax/python/syshax" in member.name and member.name.endswith(".so"):
                member.name = Path(member.name).name
                tar.extract(member, folder, filter="tar")


def packages(top: Path) -> list[Path]:
    return sorted((top / "RPMS").rglob("*.rpm"))


def standing_for(requirement: str) -> str:
    """What `host` provides for it. Fails for what this machine has not."""
    name, _, bound = requirement.partition(" ")
    if re.match(r"(lib|ld-linux).*\.so|rtld\(", name):
        soname = name.partition("(")[0]
        assert soname == "rtld" or soname in run("/sbin/ldconfig", "-p"), f"no library {soname} here"
    elif name.startswith("/"):
        assert Path(name).exists(), f"no file {name} here"
    elif name == "python(abi)":
        version = run("/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        assert bound == f"= {version}"
        return f"{name} = {version}"
    elif name == "systemd":
        return f"{name} = {run('systemctl', '--version').split()[1]}"
    else:
        assert name in PROGRAMS, f"{requirement} is required, and nothing says what stands for it"
        run("which", PROGRAMS[name])
    return name


def host(top: Path, ours: list[Path]) -> None:
    """Builds the package that stands for the base system, for what `ours` require, into TOP/RPMS."""
    own = {line.split()[0] for package in ours for line in run("rpm", "-qp", "--provides", package).splitlines()}
    needed = {line.strip() for package in ours for line in run("rpm", "-qp", "--requires", package).splitlines()}
    outside = {line for line in needed if line.split()[0] not in own and not line.startswith("rpmlib(")}
    provides = sorted({standing_for(line) for line in outside})
    spec = top / "host.spec"
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(HOST_SPEC.replace("BuildArch", f"Provides: {', '.join(provides)}\nBuildArch"))
    run("rpmbuild", "-bb", "--define", f"_topdir {top}", "--define", f"_dbpath {top}/rpmdb", spec)


def repository(folder: Path, sources: list[Path]) -> None:
    """A dnf repository of these packages."""
    folder.mkdir(parents=True)
    for package in sources:
        (folder / package.name).hardlink_to(package)
    run("createrepo_c", "-q", folder)
