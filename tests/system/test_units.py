"""What the unit files say, and what systemd's own tools make of them. Nothing here starts the daemon."""

from __future__ import annotations

import pytest
from box import ROOT, Box

UNITS = sorted(
    path.name.replace("@.", "@x.")
    for kind in ("service", "socket", "target", "slice")
    for path in (ROOT / "systemd").glob(f"*.{kind}")
)


@pytest.mark.parametrize("unit", UNITS)
def test_verify_is_clean_both_ways(box: Box, unit: str) -> None:
    """Plain misses misspelt settings, the other way misses units that are required and missing."""
    for options in ([], ["--recursive-errors=no"]):
        assert box.run("systemd-analyze", "verify", "--man=no", *options, f"/usr/lib/systemd/system/{unit}") == ""


def test_verify_notices_a_misspelt_setting(box: Box) -> None:
    text = (ROOT / "systemd/syshaxd.socket").read_text()
    box.write("/run/verify/broken.socket", text.replace("SocketMode", "SocketMod"))
    status, output = box.try_run("systemd-analyze", "verify", "--recursive-errors=no", "/run/verify/broken.socket")
    assert status != 0 and "SocketMod" in output


@pytest.mark.parametrize(("unit", "most"), [("syshaxd.service", "20"), ("syshax-api.service", "15")])
def test_exposure(box: Box, unit: str, most: str) -> None:
    """Ten times the number that `systemd-analyze security` prints."""
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true"]
    output = box.run(*command, f"--threshold={most}", unit)
    assert "Overall exposure level" in output
    assert box.try_run(*command, "--threshold=5", unit)[0] != 0, "a threshold can be missed"


def settings(unit: str) -> list[str]:
    return [line for line in (ROOT / "systemd" / unit).read_text().splitlines() if line and not line.startswith("#")]


def test_a_worker_is_tied_to_the_daemon_by_a_wish_alone() -> None:
    named = [line for line in settings("syshax-worker@.service") if "syshaxd" in line.partition("=")[2]]
    ties = {line.partition("=")[0] for line in named} - {"Description", "Documentation"}
    assert ties == {"Wants", "After"}


def test_what_must_not_be_set() -> None:
    for unit in UNITS:
        keys = {line.partition("=")[0] for line in settings(unit.replace("@x", "@"))}
        keys -= {"RuntimeDirectory"} if unit == "syshax-api.service" else set()  # its control socket goes with it
        assert not keys & {"PrivateUsers", "RuntimeDirectory", "AllowedCPUs", "AllowedMemoryNodes", "MemoryMax"}, unit


def test_no_service_gives_up() -> None:
    """A start limit would keep a service down that failed while the machine came up, until somebody resets it."""
    for unit in [name for name in UNITS if name.endswith(".service")]:
        lines = settings(unit.replace("@x", "@"))
        assert "StartLimitIntervalSec=0" in lines, unit
        assert {"Restart=always", "Restart=on-failure"} & set(lines), unit
