"""The few words that pass between systemd and the daemon: readiness, status, watchdog, sockets handed over.

Owns the environment variables of sd_notify and of socket activation. Without systemd everything here does nothing.
"""

from __future__ import annotations

import os
import socket
import time

import sdnotify

_FIRST_FD = 3


class Notifier:
    """sd_notify; silent where no one listens."""

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier()
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


def take_sockets() -> list[tuple[str, socket.socket]]:
    """Listening sockets handed over by systemd, each with its FileDescriptorName=; the variables are cleared."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    taken: list[tuple[str, socket.socket]] = []
    for offset in range(int(count)):
        descriptor = _FIRST_FD + offset
        os.set_inheritable(descriptor, False)
        name = names[offset] if offset < len(names) else str(descriptor)
        taken.append((name, socket.socket(fileno=descriptor)))
    return taken
