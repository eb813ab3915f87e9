"""The daemon's listening sockets: two made in the runtime directory, or taken over from systemd, and the view.

Owns the directory, the lock that keeps a second daemon out, stale sockets of a killed one, modes and groups, and the
file that says which daemon serves. A socket on which something listens is never taken away from it.

The view socket is always made here: whoever polls it is to see at once that no daemon is there, and must not have the
service manager start one. The daemon serves without it where it cannot be made.
"""

from __future__ import annotations

import fcntl
import grp
import logging
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syshax.errors import ConfigError, SyshaxError
from syshax.protocol import ATTACH_SOCKET, BOOT_FILE, CONTROL_SOCKET, DEFAULT_RUNTIME_DIR, DEFAULT_VIEW_DIR, VIEW_SOCKET

log = logging.getLogger("syshaxd")
LOCK_FILE = "syshaxd.lock"
_KINDS = {CONTROL_SOCKET: socket.SOCK_STREAM, ATTACH_SOCKET: socket.SOCK_SEQPACKET}
_BACKLOG = 128
_PATH_BYTES = 107


class AlreadyRunningError(SyshaxError):
    """Another daemon, or another program, has the runtime directory or its sockets."""

    exit_code = 3


@dataclass
class Listeners:
    """The sockets, non-blocking. `lock` is held as long as the daemon lives."""

    control: socket.socket
    attach: socket.socket
    lock: int
    own_paths: tuple[Path, ...]
    """Sockets that are ours to remove at the end (not systemd's)."""
    group_found: bool
    view_path: Path
    boot_path: Path
    view: socket.socket | None = None
    view_trouble: str = ""
    """Why there is no view socket."""

    def announce(self, boot: str) -> None:
        """Says in a file that this daemon serves. Who waits for one looks there: connecting would have the service
        manager start one that an administrator has stopped."""
        try:
            descriptor = os.open(self.boot_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fchmod(descriptor, 0o644)
                os.write(descriptor, f"{boot}\n".encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("idle workers will not see that this daemon serves: %s: %s", self.boot_path, error.strerror)

    def close_attach(self) -> None:
        """No new clients: connecting fails at once, so that they wait for the next daemon (systemd's socket queues)."""
        self.boot_path.unlink(missing_ok=True)
        self.attach.close()
        for path in self.own_paths:
            if path.name == ATTACH_SOCKET:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self.close_attach()
        self.control.close()
        if self.view is not None:
            self.view_path.unlink(missing_ok=True)
            self.view.close()
        for path in self.own_paths:
            path.unlink(missing_ok=True)
        os.close(self.lock)


def open_listeners(
    runtime_dir: Path,
    group: str,
    private: bool,
    handed: Sequence[tuple[str, socket.socket]] = (),
    view_group: str = "",
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
                made[name] = bind_path(runtime_dir / name, kind, group_id)
                own.append(runtime_dir / name)
    except BaseException:
        for path in own:
            path.unlink(missing_ok=True)
        os.close(lock)
        raise
    for listener in made.values():
        listener.setblocking(False)
    view_path = view_directory(runtime_dir, private) / VIEW_SOCKET
    view, trouble = _open_view(view_path, view_group, private)
    found = private or group_id is not None
    return Listeners(
        made[CONTROL_SOCKET],
        made[ATTACH_SOCKET],
        lock,
        tuple(own),
        found,
        view_path,
        runtime_dir / BOOT_FILE,
        view,
        trouble,
    )


def view_directory(runtime_dir: Path, private: bool) -> Path:
    """A directory of its own for the system's daemon, so that a front-end need not even see the other sockets."""
    return Path(DEFAULT_VIEW_DIR) if not private and runtime_dir == Path(DEFAULT_RUNTIME_DIR) else runtime_dir


def _open_view(path: Path, group: str, private: bool) -> tuple[socket.socket | None, str]:
    """The socket, or why there is none. A directory that hands its group down (2750) spares the daemon membership."""
    try:
        path.parent.mkdir(mode=0o750, exist_ok=True)
        view = bind_path(path, socket.SOCK_STREAM, None)
    except SyshaxError as error:
        return None, error.message
    except OSError as error:
        return None, f"{path.parent}: {error.strerror}"
    view.setblocking(False)
    group_id = None if private else _group_id(group)
    if group_id is None:
        return view, ""
    try:
        if path.stat().st_gid != group_id:
            os.chown(path, -1, group_id)
        path.chmod(0o660)
    except OSError as error:
        view.close()
        path.unlink(missing_ok=True)
        return None, f"{path} cannot be given to the group {group}: {error.strerror}"
    return view, ""


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


def bind_path(path: Path, kind: socket.SocketKind, group_id: int | None) -> socket.socket:
    """A listening socket there, for its owner alone or 0660 for that group. A stale one goes.

    Raises ConfigError, or AlreadyRunningError when somebody listens there.
    """
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
