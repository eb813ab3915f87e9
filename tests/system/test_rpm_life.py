"""The RPMs' life in a booted system: built, installed, started, upgraded and downgraded while they serve, removed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from box import PROGRAMS, ROOT, Box
from conftest import MODELS, Running, TinyModel
from rpm_repository import CHANGED, build, host, libraries_of, packages, repository, second_release

from syshax.protocol import ModelInfo, ModelsAnswer

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ALL = ["syshax", "python3-syshax-client", "syshax-devel", "syshax-help"]
REPOSITORIES = """[one]
name=one
baseurl=file:///opt/repositories/1
gpgcheck=0
[two]
name=two
baseurl=file:///opt/repositories/2
gpgcheck=0
enabled=0
"""
EDITED = '\n[models.tiny]\npath = "/srv/models/tiny"\nformat = "bf16"\n'
HARMLESS = {
    "no-signature", "no-packager-tag", "no-group-tag", "no-binary", "no-documentation", "no-buildroot-tag",
    "no-manual-page-for-binary", "manpage-not-compressed", "invalid-url", "invalid-license",
    "invalid-license-exception", "macro-in-comment", "incoherent-version-in-changelog", "requires-on-release",
    "package-with-huge-docs", "dangerous-command-in-%postun", "dangerous-command-in-%preun", "files-duplicate",
    "non-executable-script", "hidden-file-or-dir", "zero-length", "files-duplicated-waste",
    "unversioned-explicit-provides",
}  # fmt: skip
"""What rpmlint says of packages that are not signed, of licences and exceptions that its list lacks, of manual pages in
a package of their own, of the copies of other people's packages, and of libraries inside those, whose versions nobody
tells. Anything else fails the test."""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Release 1, compiled from a clean tarball (SYSHAX_CORE_DIR: with a core that is there); its %check passed."""
    top = tmp_path_factory.mktemp("rpm-1")
    built = os.environ.get("SYSHAX_CORE_DIR")
    log = build(top, 1, *(["--core", built] if built else []))
    assert " passed" in log.partition("%check")[2]
    return top


@pytest.fixture(scope="module")
def machine(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, TinyModel]]:
    """A booted system that can reach two releases and has nothing of syshax."""
    second, layer = tmp_path_factory.mktemp("rpm-2"), tmp_path_factory.mktemp("rpm-layer")
    second_release(first, second)
    core = second / "core"
    core.mkdir()
    (package,) = first.glob("RPMS/*/syshax-0*.rpm")
    libraries_of(package, core)
    build(second, 2, "--core", core, "--no-check")
    host(first / "host", packages(first))
    repository(layer / "opt/repositories/1", [*packages(first), *packages(first / "host")])
    repository(layer / "opt/repositories/2", packages(second))
    for path, text in {
        "etc/yum.repos.d/ci.repo": REPOSITORIES,
        "etc/rpm/macros": (ROOT / "packaging/rpm_macros_for_debian").read_text(),
        # openEuler's Python looks there, Debian's does not.
        "usr/lib/python3/dist-packages/lib64.pth": "/usr/lib64/python3.11/site-packages\n",
    }.items():
        (layer / path).parent.mkdir(parents=True, exist_ok=True)
        (layer / path).write_text(text)
    tiny = TinyModel(layer / MODELS.lstrip("/") / "tiny")
    programs = layer / PROGRAMS.lstrip("/")
    programs.mkdir(parents=True)
    for program in Path(__file__).parent.glob("inside_*.py"):
        shutil.copy(program, programs)
    with Box("rpm", layer) as box:
        yield box, tiny


def dnf(box: Box, *words: str) -> str:
    return box.run("dnf", "-q", "-y", "--releasever=1", *words, timeout=300)


def release(box: Box) -> str:
    return box.run("rpm", "-q", "--qf", "%{RELEASE}", "syshax").partition(".")[0]


def model(box: Box) -> ModelInfo:
    answer = ModelsAnswer.model_validate_json(box.run("syshaxctl", "--json", "--timeout", "60", "models"))
    (one,) = answer.models
    return one


def ours(box: Box) -> set[str]:
    """Every path that names syshax, in the folders that a package may write to."""
    found = box.run(
        "find", "/etc", "/usr", "/var", "/run", "-xdev", "-name", "*syshax*", "-not", "-path", "*/syshax-tests*"
    )
    return {path for path in found.splitlines() if not path.startswith(("/var/cache/dnf", "/var/log", "/run/log"))}


def request(box: Box, tiny: TinyModel, number: int, pause: float = 0.0) -> Running:
    """A client of the installed client package."""
    out = "/tmp/answers.npz"
    words = [
        "python3",
        "-s",
        f"{PROGRAMS}/inside_requests.py",
        "tiny",
        out,
        "--requests",
        str(number),
        "--pause",
        str(pause),
    ]
    return Running(box, tiny, out, box.popen("env", "PYTHONPATH=/usr/lib64/syshax/vendor", *words))


def test_rpmlint_finds_nothing_that_matters(first: Path) -> None:
    done = subprocess.run(
        ["rpmlint", first / "SPECS/syshax.spec", *packages(first)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if ": E: " in line or ": W: " in line]
    assert "specfiles checked" in done.stdout
    assert not [line for line in lines if "/vendor/" not in line and line.split()[2] not in HARMLESS]


def test_install_upgrade_downgrade_remove(machine: tuple[Box, TinyModel]) -> None:
    box, tiny = machine
    before = ours(box)
    installed(box)
    started(box, tiny)
    changed(box, tiny, "upgrade", "2")
    changed(box, tiny, "downgrade", "1")
    developed(box)
    removed(box, before)


def installed(box: Box) -> None:
    dnf(box, "install", *ALL)
    assert box.run("rpm", "-V", *ALL) == ""
    assert box.run("id", "-gn", "syshax") == "syshax"
    enabled = {unit: box.try_run("systemctl", "is-enabled", unit)[1] for unit in ("syshaxd.service", "syshaxd.socket")}
    assert set(enabled.values()) == {"enabled"}
    assert box.try_run("systemctl", "is-enabled", "syshax-api.service")[1] == "disabled"
    assert not box.is_active()
    for page in ("syshaxd", "syshax-api", "syshax-worker", "syshaxctl", "syshaxd.toml"):
        file = box.run("man", "-w", page)
        assert box.run("sh", "-c", f"LC_ALL=C.UTF-8 man --warnings -l -Tutf8 {file} 2>&1 >/dev/null") == ""
        assert box.run("mandoc", "-T", "lint", "-W", "warning", file) == ""
    for program in ("syshaxctl", "syshaxd", "syshax-api", "syshax-worker"):
        box.run("zsh", "-n", f"/usr/share/zsh/site-functions/_{program}")
        box.run("fish", "-n", f"/usr/share/fish/vendor_completions.d/{program}.fish")
    assert "syshax-worker MODEL" in box.run("env", "PYTHONPATH=/usr/lib64/syshax/vendor", "syshax-worker", "--help")


def started(box: Box, tiny: TinyModel) -> None:
    """Edited, started, a model loaded by hand: after a restart that has to read it again, it would be gone."""
    edited = box.path("/etc/syshax/syshaxd.toml")
    edited.write_text(edited.read_text().replace("# sessions = 64", "sessions = 7") + EDITED)
    box.write("/etc/syshax/syshaxd.toml.d/own.toml", "[memory]\nreserve = 1\n")
    box.systemctl("start", "syshaxd.socket", "syshaxd.service")
    box.run("syshaxctl", "load", "--name", "tiny", "--wait")
    request(box, tiny, 3).check(3)
    assert model(box).origin == "checkpoint"


def changed(box: Box, tiny: TinyModel, verb: str, to: str) -> None:
    """Another release comes while a client computes: it gets every answer, from the weights that were there."""
    pid, socket = box.main_pid(), box.show("syshaxd.socket", "ActiveEnterTimestampMonotonic")
    client = request(box, tiny, 60, pause=0.2)
    client.wait_for("answer 3")
    target = [f"{name}-0.1.0-1.ci" for name in ALL] if verb == "downgrade" else []
    dnf(box, "--enablerepo=two", verb, *target)
    assert release(box) == to and box.main_pid() != pid and box.is_active()
    assert box.show("syshaxd.socket", "ActiveEnterTimestampMonotonic") == socket
    client.check(60, timeout=120)
    assert model(box).origin == "restart"
    configuration = box.path("/etc/syshax/syshaxd.toml").read_text()
    assert EDITED in configuration and CHANGED not in configuration
    assert box.path("/etc/syshax/syshaxd.toml.rpmnew").read_text().endswith(CHANGED) == (to == "2")
    assert box.path("/etc/syshax/syshax-api.toml").read_text().endswith(CHANGED) == (to == "2")
    assert box.run("syshaxctl", "config", "show", "limits.sessions").count("7")


def developed(box: Box) -> None:
    """The example operator builds from what syshax-devel installed, and passes the daemon's own check."""
    source = "/usr/share/syshax/examples/int8row"
    box.run("cmake", "-S", source, "-B", "/tmp/int8row", timeout=120)
    box.run("cmake", "--build", "/tmp/int8row", timeout=300)
    assert "passed" in box.run("syshaxd", "operators", "check", "/tmp/int8row/libint8row.so", timeout=300)


def removed(box: Box, before: set[str]) -> None:
    dnf(box, "remove", *ALL)
    assert not box.is_active() and not box.is_active("syshaxd.socket")
    assert "syshax" not in box.run("ls", "-l", "/proc/1/fd")
    left = {path for path in ours(box) - before if not path.startswith("/var/lib/syshax")}
    beside = {f"/etc/syshax/syshaxd.toml.{kind}" for kind in ("d", "rpmnew", "rpmsave")}
    assert left == {"/etc/syshax", *beside}
    assert EDITED in box.path("/etc/syshax/syshaxd.toml.rpmsave").read_text()
    assert box.path("/etc/syshax/syshaxd.toml.d/own.toml").exists()
    assert box.path("/var/lib/syshax").is_dir()
