"""The RPMs, built from a tarball with the core that is installed here: what is in each; the client works alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import syshax
import syshaxd

ROOT = Path(__file__).resolve().parent.parent.parent
SPEC = (ROOT / "packaging/syshax.spec").read_text()
pytestmark = pytest.mark.timeout(1200)
COMMANDS = {"syshax": ["syshaxd", "syshax-api", "syshaxctl"], "python3-syshax-client": ["syshax-worker"]}


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("rpm")
    core = top / "core"
    core.mkdir()
    (extension,) = Path(syshaxd.__file__).parent.glob("_core*.so")
    shutil.copy(extension, core)
    shutil.copy(Path(syshax.__file__).parent / "libsyshax_client.so", core)
    run(sys.executable, "packaging/rpm.py", top, "--core", core, "--python", sys.executable, "--no-check", cwd=ROOT)
    return {run("rpm", "-qp", "--qf", "%{NAME}", path): path for path in (top / "RPMS").rglob("*.rpm")}


def files(package: Path) -> list[str]:
    return run("rpm", "-qpl", package).split()


def test_each_package_has_its_files(packages: dict[str, Path]) -> None:
    assert set(packages) == {"syshax", "python3-syshax-client", "syshax-devel", "syshax-help"}
    for name, package in packages.items():
        listed = files(package)
        assert any(file.endswith("/LICENSE") for file in listed), name
        assert {Path(file).name for file in listed if file.startswith("/usr/bin/")} == set(COMMANDS.get(name, []))
        assert run("rpm", "-qp", "--qf", "%{LICENSE}", package).startswith("MulanPSL-2.0")
    assert {Path(file).name for file in files(packages["syshax-help"]) if "/man/" in file} == {
        f"{page.stem}.gz" for page in (ROOT / "docs/man").glob("*.md")
    }
    assert len([file for file in files(packages["syshax-help"]) if "/zsh/" in file]) == 4
    headers = {header.name for header in (ROOT / "csrc/include/syshax").iterdir()}
    assert headers <= {Path(file).name for file in files(packages["syshax-devel"])}


def test_the_service_is_complete_and_its_configuration_is_kept(packages: dict[str, Path]) -> None:
    listed = files(packages["syshax"])
    for unit in (ROOT / "systemd").glob("*.*"):
        if unit.suffix in {".service", ".socket", ".target", ".slice"}:
            assert f"/usr/lib/systemd/system/{unit.name}" in listed
    configuration = run("rpm", "-qp", "--qf", "[%{FILEFLAGS:fflags} %{FILENAMES}\n]", packages["syshax"]).splitlines()
    kept = [line.split()[1] for line in configuration if line.startswith("cn ")]
    assert sorted(kept) == [
        f"/etc/syshax/{name}" for name in ("syshax-api.toml", "syshaxd.toml", "workers/example.env")
    ]
    assert len([file for file in listed if re.search(r"/vendor/[^/]+\.dist-info/METADATA$", file)]) > 20
    assert not [file for file in listed if "/site-packages/" in file]


def test_nothing_bundled_is_promised_to_or_asked_of_the_system(packages: dict[str, Path]) -> None:
    provided = run("rpm", "-qp", "--provides", packages["syshax"]).splitlines()
    assert not [line for line in provided if ".so" in line]
    required = run("rpm", "-qp", "--requires", packages["syshax"]).splitlines()
    assert "libhwloc.so.15()(64bit)" in required
    assert not [line for line in required if re.search(r"openblas|gfortran|[0-9a-f]{8}\.so", line)]
    bundled = run(sys.executable, "packaging/bundle.py", "list", cwd=ROOT).splitlines()
    named = {f"bundled(python3dist({name})) = {version}" for name, version, *_ in map(str.split, bundled)}
    assert named == {line for line in provided if line.startswith("bundled(python3dist(")}
    copies = {file.split("/")[5] for file in files(packages["syshax"]) if re.search(r"/vendor/[^/]+\.dist-info/", file)}
    with_licence = {
        file.split("/")[5] for file in files(packages["syshax"]) if re.search(r"info/.*(LICEN[CS]E|COPYING)", file)
    }
    assert len(copies) == len(bundled) and copies <= with_licence


def test_scriptlets_restart_the_daemon_but_neither_sockets_nor_workers(packages: dict[str, Path]) -> None:
    scripts = run("rpm", "-qp", "--scripts", packages["syshax"])
    after = scripts.partition("postuninstall")[2]
    (restarted,) = re.findall(r"try-restart (.*?) \|\|", after)
    assert restarted.split() == ["syshaxd.service", "syshax-api.service"]
    for word in ("systemd-sysusers", "systemd-tmpfiles", "preset syshaxd.socket", "disable --now syshaxd.socket"):
        assert word in scripts


def test_the_client_works_without_the_daemon_s_package(packages: dict[str, Path], tmp_path: Path) -> None:
    archive = tmp_path / "client.tgz"
    with packages["python3-syshax-client"].open("rb") as package, archive.open("wb") as out:
        subprocess.run(["rpm2archive", "-"], stdin=package, stdout=out, check=True)
    run("tar", "-xf", archive, "-C", tmp_path)
    (site,) = tmp_path.glob("usr/lib64/python3*/site-packages")
    (wheel,) = tmp_path.glob("usr/share/syshax/wheels/*-py3-none-linux_*.whl")
    unpacked = tmp_path / "wheel"
    run(sys.executable, "-m", "zipfile", "-e", wheel, unpacked)
    program = (
        "import sys, importlib.metadata as m, importlib.util\n"
        "import syshax.vllm.launcher, syshax.ring\n"
        "assert syshax.__file__.startswith(sys.argv[1]), syshax.__file__\n"
        "assert importlib.util.find_spec('syshax.ctl') is None\n"
        "(one,) = m.Distribution.discover(name='syshax', path=[sys.argv[1]])\n"
        "assert [e.name for e in one.entry_points if e.group == 'vllm.general_plugins'] == ['syshax']\n"
        "assert [e.name for e in one.entry_points if e.group == 'console_scripts'] == ['syshax-worker']\n"
        "assert sorted(r.split('>')[0] for r in one.requires) == ['numpy', 'pydantic']\n"
    )
    for folder in (site, unpacked):
        run(sys.executable, "-c", program, folder, env={"PYTHONPATH": str(folder)}, cwd=tmp_path)


def test_spec_and_changelog_have_the_project_s_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"(?m)^Version: +{re.escape(version)}$", SPEC)
    assert re.search(rf"(?m)^%changelog\n\* .* {re.escape(version)}-\d+$", SPEC)
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
