"""The daemon's two listening sockets: made in the runtime directory, or taken over from systemd.

Owns the directory, the lock that keeps a second daemon out, stale sockets of a killed one, modes and groups. A socket
on which something listens is never taken away from it.
"""

from __future__ import annotations

import fcntl
import grp
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syshax.errors import ConfigError, SyshaxError
from syshax.protocol import ATTACH_SOCKET, CONTROL_SOCKET

LOCK_FILE = "syshaxd.lock"
_KINDS = {CONTROL_SOCKET: socket.SOCK_STREAM, ATTACH_SOCKET: socket.SOCK_SEQPACKET}
_BACKLOG = 128
_PATH_BYTES = 107


class AlreadyRunningError(SyshaxError):
    """Another daemon, or another program, has the runtime directory or its sockets."""

    exit_code = 3


@dataclass
class Listeners:
    """Both sockets, non-blocking. `lock` is held as long as the daemon lives."""

    control: socket.socket
    attach: socket.socket
    lock: int
    own_paths: tuple[Path, ...]
    """Sockets that are ours to remove at the end (not systemd's)."""
    group_found: bool

    def close_attach(self) -> None:
        """No new clients: connecting fails at once, so that they wait for the next daemon (systemd's socket queues)."""
        self.attach.close()
        for path in self.own_paths:
            if path.name == ATTACH_SOCKET:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self.close_attach()
        self.control.close()
        for path in self.own_paths:
            path.unlink(missing_ok=True)
        os.close(self.lock)


def open_listeners(
    runtime_dir: Path, group: str, private: bool, handed: Sequence[tuple[str, socket.socket]] = ()
) -> Listeners:
    """private: no group, 0700, 0600. handed: the service manager's sockets, used instead of own ones.

    Raises ConfigError (a directory that cannot be used) or AlreadyRunningError.
    """
    lock = _lock(runtime_dir, private)
    group_id = None if private else _group_id(group)
    own: list[Path] = []
    try:
        made = _handed_over(handed)
        for name, kind in _KINDS.items():
            if name not in made:
                made[name] = _bind(runtime_dir / name, kind, group_id)
                own.append(runtime_dir / name)
    except BaseException:
        for path in own:
            path.unlink(missing_ok=True)
        os.close(lock)
        raise
    for listener in made.values():
        listener.setblocking(False)
    return Listeners(made[CONTROL_SOCKET], made[ATTACH_SOCKET], lock, tuple(own), private or group_id is not None)


def _lock(runtime_dir: Path, private: bool) -> int:
    try:
        runtime_dir.mkdir(mode=0o700 if private else 0o755, parents=True, exist_ok=True)
        status = runtime_dir.stat()
        if private and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise ConfigError(
                f"{runtime_dir} is not private: owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
                "remove it, or choose another with --runtime-dir",
            )
        descriptor = os.open(runtime_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the runtime directory {runtime_dir} cannot be used: {error.strerror}",
            "choose one with --runtime-dir, or start with --user for a private one",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise AlreadyRunningError(
            f"another syshaxd (pid {owner}) runs in {runtime_dir}", "stop it first, or choose another --runtime-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _group_id(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


def _handed_over(sockets: Sequence[tuple[str, socket.socket]]) -> dict[str, socket.socket]:
    """Systemd's sockets by our names. Their kinds tell which is which: all sockets of one unit have the same
    FileDescriptorName=. Raises ConfigError for one that is neither."""
    found: dict[str, socket.socket] = {}
    for name, handed in sockets:
        ours = next(
            (ours for ours, kind in _KINDS.items() if (handed.family, handed.type) == (socket.AF_UNIX, kind)), ""
        )
        if not ours or ours in found:
            raise ConfigError(
                f"systemd handed over a socket that syshaxd has no use for ({name}: {handed.family.name}, "
                f"{handed.type.name})",
                "one ListenStream= (control) and one ListenSequentialPacket= (attach), each with a path",
            )
        found[ours] = handed
    return found


def _bind(path: Path, kind: socket.SocketKind, group_id: int | None) -> socket.socket:
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise ConfigError(f"{path}: a socket's path has at most {_PATH_BYTES} bytes", "choose a shorter --runtime-dir")
    _remove_stale(path, kind)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    old_mask = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        if group_id is not None:
            os.chown(path, -1, group_id)
            path.chmod(0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{path}: the socket cannot be made: {error.strerror}") from error
    finally:
        os.umask(old_mask)
    return listener


def _remove_stale(path: Path, kind: socket.SocketKind) -> None:
    """A socket that nobody listens on any more goes; a live one, or a file of another kind, stays and is an error."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is in the way: it is not a socket", "move it, or choose another --runtime-dir")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            reason = error.strerror
        else:
            reason = "it answers"
    raise AlreadyRunningError(
        f"{path} is in use by another program ({reason})", "stop it, or choose another --runtime-dir"
    )
