"""The few words that pass between systemd and the daemon: readiness, status, watchdog, descriptors handed over.

Owns the environment variables of sd_notify and of socket activation. Without systemd everything here does nothing.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from dataclasses import dataclass, field

import sdnotify

_FIRST_FD = 3


class Notifier:
    """sd_notify; silent where no one listens."""

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        self.supervised = bool(os.environ.get("NOTIFY_SOCKET") and os.environ.get("INVOCATION_ID"))
        """A service manager started this process and hears of it: it would start it again."""
        self._status = ""

    def ready(self, status: str) -> None:
        self._notifier.notify(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self._notifier.notify(f"STATUS={status}")

    def reloading(self) -> None:
        self._notifier.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._notifier.notify(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        self._notifier.notify("WATCHDOG=1")


def watchdog_seconds() -> float | None:
    """WatchdogSec= of the unit, where it is meant for this process."""
    wanted, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return int(wanted) / 1e6 if wanted.isdigit() and int(wanted) > 0 and pid == str(os.getpid()) else None


@dataclass
class Handed:
    """Descriptors that the service manager handed over, each with its name; names may repeat."""

    sockets: list[tuple[str, socket.socket]] = field(default_factory=list)
    """Those that listen."""
    others: list[tuple[str, int]] = field(default_factory=list)
    """What earlier lives of this service put into the manager's store."""


def take_handed() -> Handed:
    """What was handed over to this process, closed on exec from now on; the variables are cleared."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    handed = Handed()
    if pid != str(os.getpid()) or not count.isdigit():
        return handed
    for offset in range(int(count)):
        descriptor = _FIRST_FD + offset
        os.set_inheritable(descriptor, False)
        name = names[offset] if offset < len(names) else str(descriptor)
        if _listens(descriptor):
            handed.sockets.append((name, socket.socket(fileno=descriptor)))
        else:
            handed.others.append((name, descriptor))
    return handed


def _listens(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as seen:
        return bool(seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
