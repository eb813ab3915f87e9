"""The sockets that clients connect to: made here, or handed over by systemd. Owns the words for what goes wrong."""

from __future__ import annotations

import errno
import os
import socket

from syshax.errors import ConfigError
from syshaxd.frontend.config import ApiConfig

BACKLOG = 4096
"""Connections that wait to be taken in; a burst of more would be dropped, and hang until the client tries again."""


def listen(config: ApiConfig) -> list[socket.socket]:
    """Non-blocking listening sockets for every address of `host`. `ConfigError` when there is none to be had."""
    made: list[socket.socket] = []
    try:
        port = config.port
        for family, kind, protocol, _, address in _addresses(config):
            made.append(socket.socket(family, kind, protocol))
            made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made[-1].setblocking(False)
            made[-1].bind((address[0], port, *address[2:]))
            port = port or made[-1].getsockname()[1]
            made[-1].listen(BACKLOG)
    except OSError as error:
        for listener in made:
            listener.close()
        raise _cannot_listen(config, error) from None
    return made


def address_of(listener: socket.socket) -> str:
    """As a URL."""
    address = listener.getsockname()
    if not isinstance(address, tuple):
        return f"unix:{address}"
    return f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"


def _addresses(config: ApiConfig) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(found))  # type: ignore[arg-type]


def _cannot_listen(config: ApiConfig, error: OSError) -> ConfigError:
    where = f"cannot listen on {config.host}:{config.port}"
    if isinstance(error, socket.gaierror):
        return ConfigError(f"{where}: {error.strerror}", "host must be an address or name of this machine")
    hints = {
        errno.EADDRINUSE: "another program listens there: stop it, or choose another --port",
        errno.EACCES: "ports below 1024 need the capability CAP_NET_BIND_SERVICE, or socket activation",
        errno.EADDRNOTAVAIL: "host must be an address of this machine (`ip address` lists them)",
    }
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return ConfigError(f"{where}: {reason}", hints.get(error.errno or 0, ""))
