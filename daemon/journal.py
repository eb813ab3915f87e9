"""Log records into systemd's journal with fields of their own (journalctl SYSHAX_MODEL=qwen3), by its native protocol.

Owns the protocol and the fields' names: one datagram a record on /run/systemd/journal/socket, a sealed memory file
where a record is too large for one. Used only where systemd connected our standard error to the journal.
Protocol: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOCKET = Path("/run/systemd/journal/socket")
PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_NAME_CHARS = 57
"""The journal takes 64."""


def is_connected(stream: str | None, descriptor: int) -> bool:
    """Whether $JOURNAL_STREAM ("device:inode") is this descriptor: a child may have inherited the variable alone."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def field_name(fact: str) -> str:
    """request_id -> SYSHAX_REQUEST_ID"""
    return "SYSHAX_" + re.sub(r"[^A-Z0-9_]", "_", fact.upper())[:_NAME_CHARS]


def entry(fields: Mapping[str, str]) -> bytes:
    """The protocol's text; a value with line ends goes with its length."""
    parts = []
    for name, value in fields.items():
        data = value.encode(errors="surrogateescape")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


class JournalHandler(logging.Handler):
    """Sends records; what the journal does not take goes to `fallback`. The formatter gives MESSAGE."""

    def __init__(self, identifier: str, facts: Any, fallback: logging.Handler, address: Path = SOCKET) -> None:
        """facts(record) gives the record's own facts by name."""
        super().__init__()
        self._identifier, self._facts, self._fallback, self._address = identifier, facts, fallback, str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(entry(self.fields(record)))
        except OSError:
            self._fallback.handle(record)
        except Exception:  # noqa: BLE001  # logging must not end what is logged
            self.handleError(record)

    def fields(self, record: logging.LogRecord) -> dict[str, str]:
        return {
            "MESSAGE": self.format(record),
            "PRIORITY": str(PRIORITY.get(record.levelno, 6)),
            "SYSLOG_IDENTIFIER": self._identifier,
            "SYSHAX_LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
            **{field_name(name): str(value) for name, value in self._facts(record).items()},
        }

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._address)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):  # larger than a datagram may be
                raise
            self._send_file(data)

    def _send_file(self, data: bytes) -> None:
        file = os.memfd_create("syshax-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with os.fdopen(os.dup(file), "wb") as stream:
                stream.write(data)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))
            self._socket.sendmsg([b""], [rights], 0, self._address)
        finally:
            os.close(file)

    def close(self) -> None:
        self._socket.close()
        super().close()
