"""One reading of the machine and of the caller, so that every check is a function of it and tests can make one up.

Owns what is read: files below `root` (/proc, /sys, /dev, /etc) when a check asks for them, and the few facts that are
no files, taken by `read()`. It judges nothing.
"""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

UNITS = ("syshaxd.service", "syshaxd.socket", "syshax-api.service", "syshax-api.socket")
_UNIT_FACTS = "Id,LoadState,ActiveState,SubState,UnitFileState,Result,NRestarts"
_SYSTEMCTL_SECONDS = 5.0


@dataclass(frozen=True)
class Group:
    gid: int
    members: frozenset[str]


@dataclass(frozen=True)
class Snapshot:
    """`gids` are the process's groups, `groups` what the system knows of the named ones."""

    root: Path = Path("/")
    uid: int = 0
    user: str = "root"
    gids: frozenset[int] = frozenset()
    groups: Mapping[str, Group] = field(default_factory=dict)
    shm: tuple[int, int] | None = None
    """(free, size) of /dev/shm in bytes; None: there is none."""
    units: Mapping[str, Mapping[str, str]] | None = None
    """systemctl's properties by unit; None: no systemd runs here, or it does not answer."""

    @classmethod
    def read(cls, groups: Sequence[str] = (), units: bool = True) -> Snapshot:
        """This machine, as this process sees it."""
        return cls(
            uid=os.geteuid(),
            user=_user_name(os.geteuid()),
            gids=frozenset({os.getegid(), *os.getgroups()}),
            groups={name: found for name in groups if (found := _group(name)) is not None},
            shm=_shared_memory(),
            units=_units() if units else None,
        )

    def text(self, name: str) -> str | None:
        """A file's text without the white space around it; None where it cannot be read."""
        try:
            return (self.root / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def meminfo(self) -> dict[str, int]:
        """/proc/meminfo in bytes (counts as they are)."""
        values: dict[str, int] = {}
        for line in (self.text("proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        return values

    def nodes(self) -> int:
        """NUMA nodes that are online."""
        return max(1, sum(1 for _ in (self.root / "sys/devices/system/node").glob("node[0-9]*")))

    def group_name(self, gid: int) -> str:
        named = next((name for name, group in self.groups.items() if group.gid == gid), None)
        return named or _group_name(gid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _group(name: str) -> Group | None:
    try:
        found = grp.getgrnam(name)
    except KeyError:
        return None
    return Group(found.gr_gid, frozenset(found.gr_mem))


def _shared_memory() -> tuple[int, int] | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def _units() -> dict[str, dict[str, str]] | None:
    if not Path("/run/systemd/system").is_dir():
        return None
    try:
        shown = subprocess.run(
            ["systemctl", "show", f"--property={_UNIT_FACTS}", *UNITS],
            capture_output=True,
            text=True,
            timeout=_SYSTEMCTL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_units(shown.stdout)


def parse_units(text: str) -> dict[str, dict[str, str]] | None:
    """`systemctl show` of several units: KEY=VALUE lines, an empty line between units."""
    found: dict[str, dict[str, str]] = {}
    for block in text.split("\n\n"):
        facts = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if name := facts.get("Id"):
            found[name] = facts
    return found or None
