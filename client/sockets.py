"""Where the daemon's sockets lie, how connecting to them fails, and how to see a daemon without connecting.

Owns the runtime directory's resolution and the one translation from a failed connect to the error tree, for the
attach socket and the control API alike. Knows nothing of what is said over the connection.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
import stat
import time
from pathlib import Path

from syshax.errors import DaemonAbsentError, InternalError, InvalidArgumentError, NotAllowedError, RequestTimeoutError
from syshax.protocol import BOOT_FILE, DEFAULT_RUNTIME_DIR

GROUP = "syshax"
RUNTIME_DIR_VARIABLE = "SYSHAX_RUNTIME_DIR"
_PATH_BYTES = 107
"""The kernel's limit on a Unix socket's path."""


def runtime_directory(runtime_dir: str | os.PathLike[str] | None = None) -> Path:
    """The given directory, else $SYSHAX_RUNTIME_DIR, else /run/syshax."""
    return Path(runtime_dir or os.environ.get(RUNTIME_DIR_VARIABLE) or DEFAULT_RUNTIME_DIR)


def daemon_boot(runtime_dir: Path) -> str:
    """The boot id of the daemon that serves there, as it says in a file; "" where none does. One that was killed may be
    named still. For who waits: to connect to systemd's sockets would start a daemon that an administrator stopped."""
    try:
        return (runtime_dir / BOOT_FILE).read_text(errors="replace").strip()
    except OSError:
        return ""


def connect(path: Path, kind: socket.SocketKind, timeout: float, service: str = "syshaxd") -> socket.socket:
    """A connected socket with that timeout set. service: whose it is, for errors.

    Raises DaemonAbsentError, NotAllowedError (names the group and the socket's mode), RequestTimeoutError when the
    daemon's queue of connections stays full, InvalidArgumentError for a path that no socket can have.
    """
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise InvalidArgumentError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, the kernel allows {_PATH_BYTES}",
            "use a shorter runtime directory",
        )
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout)
        while True:
            try:
                connection.connect(os.fspath(path))
                return connection
            except BlockingIOError:  # the listener's backlog is full
                if time.monotonic() >= deadline:
                    raise RequestTimeoutError(
                        f"{path}: {service} accepted no connection within {timeout:g} s",
                        "is the daemon stopped or stuck?",
                    ) from None
                time.sleep(0.01)
    except OSError as error:
        connection.close()
        raise _connect_error(path, error, service) from error
    except BaseException:
        connection.close()
        raise


_PLACES = {
    "syshaxd": f"or name its directory (runtime_dir or ${RUNTIME_DIR_VARIABLE})",
    "syshax-api": "or name its socket (--api-socket); it makes one where control.socket or its unit says so",
}


def _connect_error(path: Path, error: OSError, service: str) -> Exception:
    start = f"start it with `systemctl start {service}`, {_PLACES[service]}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DaemonAbsentError(f"no {service} at {path}: there is no such socket", start)
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
        return DaemonAbsentError(f"no {service} listens on {path}: the socket is there, its daemon is not", start)
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotAllowedError(
            f"{path} refuses this user (uid {os.geteuid()}): {_access(path)}",
            f"join the group: `usermod -aG {GROUP} USER`, then log in again; in a container run with that group's id",
        )
    if error.errno in (errno.EPROTOTYPE, errno.ENOTSOCK):
        return InternalError(f"{path} is not the kind of socket that {service} makes: {error.strerror}")
    if isinstance(error, TimeoutError):
        return RequestTimeoutError(f"{path}: connecting took too long", "is the daemon stopped or stuck?")
    return InternalError(f"{path}: {error}")


def _access(path: Path) -> str:
    """The socket's owner group and mode, or the directory that hides them."""
    try:
        status = path.stat()
    except OSError as error:
        return f"its directory cannot be searched ({error.strerror})"
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return f"its group is {group} and its mode {stat.S_IMODE(status.st_mode):04o}"
