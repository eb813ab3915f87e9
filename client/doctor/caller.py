"""Checks around the caller: may it talk to the daemon, are the sockets and units in order, do the versions fit.

Owns the rules; each is a function of a Caller. They run in syshaxctl, whether or not a daemon answers.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from syshax.doctor.findings import error, fine, run_all, warning
from syshax.doctor.snapshot import Snapshot
from syshax.errors import SyshaxError
from syshax.protocol import ATTACH_SOCKET, CONTROL_SOCKET, Check
from syshax.sockets import GROUP

ADMIN_GROUP = "syshax-admin"
_START = "systemctl start syshaxd (or syshaxd --user)"
_LISTENS = 0x10000
"""__SO_ACCEPTCON in the flags of /proc/net/unix."""


@dataclass(frozen=True)
class Caller:
    """`failure`: why the daemon did not answer; None: it did, with `versions` of its own."""

    snapshot: Snapshot
    runtime_dir: Path
    failure: SyshaxError | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    own_versions: Mapping[str, str] = field(default_factory=dict)


def check_caller(caller: Caller) -> list[Check]:
    return run_all(CALLER_CHECKS, caller)


def daemon(caller: Caller) -> Iterator[Check]:
    if caller.failure is None:
        yield fine("daemon", f"answers at {caller.runtime_dir / CONTROL_SOCKET}")
    else:
        yield error("daemon", caller.failure.message, "no worker gets an answer", caller.failure.hint or _START)


def sockets(caller: Caller) -> Iterator[Check]:
    for name in (CONTROL_SOCKET, ATTACH_SOCKET):
        yield from _socket(caller, caller.runtime_dir / name)


def _socket(caller: Caller, path: Path) -> Iterator[Check]:
    name = f"socket {path.name}"
    try:
        status = path.stat()
    except FileNotFoundError:
        yield error(name, f"{path} does not exist", "nobody can reach the daemon", _START)
        return
    except PermissionError:
        hint = f"usermod -aG {GROUP} {caller.snapshot.user}, then log in again"
        yield error(name, f"{path.parent} may not be searched by {caller.snapshot.user}", "it cannot be reached", hint)
        return
    mode, group = stat.S_IMODE(status.st_mode), caller.snapshot.group_name(status.st_gid)
    text = f"{path} has the mode {mode:04o}, group {group}"
    if not stat.S_ISSOCK(status.st_mode):
        yield error(name, f"{path} is no socket", "the daemon cannot be reached", f"rm {path}, then {_START}")
    elif mode & stat.S_IWOTH:
        yield warning(name, text, "everybody on this machine may use the daemon", f"chmod 0660 {path}")
    elif _listens(caller.snapshot, path) is False:
        yield error(name, f"{text}, and nobody listens", "whoever connects is refused", _START)
    else:
        yield fine(name, text)


def _listens(snapshot: Snapshot, path: Path) -> bool | None:
    """None: the table does not show it, as in a container with a network of its own. Connections have the path too."""
    rows = [line.split(maxsplit=7) for line in (snapshot.text("proc/net/unix") or "").splitlines()[1:]]
    flags = [int(words[3], 16) for words in rows if len(words) == 8 and words[7] == str(path)]
    return any(flag & _LISTENS for flag in flags) if flags else None


def membership(caller: Caller) -> Iterator[Check]:
    """Whether this user's processes may connect: by user, by a group of the process, or not before the next login."""
    snapshot = caller.snapshot
    if snapshot.uid == 0:
        yield fine("group", "root may do everything")
        return
    try:
        status = (caller.runtime_dir / CONTROL_SOCKET).stat()
        owner, gid = status.st_uid, status.st_gid
    except OSError:
        owner, gid = -1, snapshot.groups[GROUP].gid if GROUP in snapshot.groups else -1
    name = snapshot.group_name(gid) if gid >= 0 else GROUP
    group = snapshot.groups.get(name)
    if owner == snapshot.uid:
        yield fine("group", f"the daemon is {snapshot.user}'s own")
    elif gid in snapshot.gids:
        admin = snapshot.groups.get(ADMIN_GROUP)
        also = f" and {ADMIN_GROUP}: may load and unload" if admin and admin.gid in snapshot.gids else ""
        yield fine("group", f"{snapshot.user} is in {name}{also}")
    elif group is not None and snapshot.user in group.members:
        cost = "this login cannot reach the daemon"
        yield error("group", f"{snapshot.user} is in {name}, but this login is older", cost, f"newgrp {name}")
    elif gid < 0:
        cost = "only root can reach a daemon that runs as a service"
        yield warning("group", f"there is no group {GROUP}", cost, f"groupadd -r {GROUP} && systemctl restart syshaxd")
    else:
        cost = "neither syshaxctl nor workers of this user can reach the daemon"
        yield error(
            "group", f"{snapshot.user} is not in {name}", cost, f"usermod -aG {name} {snapshot.user}, log in again"
        )


def units(caller: Caller) -> Iterator[Check]:
    found = caller.snapshot.units
    if found is None:
        yield fine("units", "no systemd answers here")
        return
    if all(facts.get("LoadState") == "not-found" for facts in found.values()):
        if caller.failure is None:
            yield fine("units", "not installed; the daemon was started by hand")
        else:
            yield warning(
                "units", "not installed", "nothing starts syshaxd", "packaging/install.sh, or dnf install syshax"
            )
        return
    for name, facts in found.items():
        yield from _unit(name, facts)


def _unit(name: str, facts: Mapping[str, str]) -> Iterator[Check]:
    check, service = f"unit {name}", name.removesuffix(".socket").removesuffix(".service")
    active, wanted = facts.get("ActiveState", ""), name.startswith("syshaxd")
    restarts = facts.get("NRestarts", "0")
    if facts.get("LoadState") == "not-found":
        yield fine(check, "not installed")
    elif facts.get("LoadState") == "masked":
        yield error(check, "masked", "it cannot be started", f"systemctl unmask {name}")
    elif active == "failed":
        why, mend = facts.get("Result", "unknown"), f"systemctl restart {name}"
        yield error(check, f"failed ({why})", "it does not run", f"journalctl -u {service} -b; mend it, then {mend}")
    elif wanted and facts.get("UnitFileState") == "disabled":
        yield warning(
            check, f"{active}, not enabled", "it does not start after a reboot", f"systemctl enable --now {name}"
        )
    elif restarts.isdigit() and int(restarts) > 0:
        cost = "each restart is a pause for every worker"
        yield warning(check, f"{active}, restarted {restarts} times by itself", cost, f"journalctl -u {service} -b")
    else:
        yield fine(check, f"{active}, {facts.get('UnitFileState') or 'not enabled'}")


def versions(caller: Caller) -> Iterator[Check]:
    own, other = caller.own_versions, caller.versions
    if caller.failure is not None:
        yield fine("versions", f"client {_listed(own)}; the daemon does not answer")
    elif not other:
        cost = "an older daemon: whether it fits is not known before a worker attaches"
        yield warning("versions", f"client {_listed(own)}; the daemon tells none", cost, "systemctl restart syshaxd")
    elif differing := [name for name in ("protocol", "ring") if own.get(name) != other.get(name)]:
        cost = "workers of this installation cannot attach"
        yield error("versions", _compared(own, other, differing), cost, "install the same version of both sides")
    elif own.get("syshax") != other.get("syshax"):
        cost = "they understand each other; what is newer on one side alone is not there"
        yield warning(
            "versions", _compared(own, other, ["syshax"]), cost, "dnf upgrade, then systemctl restart syshaxd"
        )
    else:
        yield fine("versions", f"both sides {_listed(own)}")


def _listed(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _compared(own: Mapping[str, str], other: Mapping[str, str], names: list[str]) -> str:
    return "; ".join(f"{name}: client {own.get(name, 'none')}, daemon {other.get(name, 'none')}" for name in names)


CALLER_CHECKS: tuple[Callable[[Caller], Iterator[Check]], ...] = (daemon, sockets, membership, units, versions)
