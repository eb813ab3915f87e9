"""Log lines on standard error: text for people, JSON for collectors; where standard error is the journal, records with
fields.

Owns the formats and the choice. Modules log through logging.getLogger(__name__) and give facts as `extra={...}`;
nothing here or there logs weights, prompts or keys.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import lru_cache
from typing import Any

from syshaxd.config import LoggingConfig
from syshaxd.journal import PRIORITY, JournalHandler, is_connected

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _message(record: logging.LogRecord) -> str:
    """On one line."""
    return record.getMessage().replace("\n", "\\n")


@lru_cache(maxsize=1)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _time(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """One line: time, level, message, facts as key=value. Under journald its priority instead of time and level."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={value}" for key, value in _facts(record).items())
        text = _message(record) + facts
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journal:
            prefix = f"<{PRIORITY.get(record.levelno, 6)}>"
            return "\n".join(prefix + line for line in text.splitlines())
        return f"{_time(record)} {record.levelname.lower()}: {text}"


class MessageFormatter(logging.Formatter):
    """The message alone, with a traceback: the rest are fields. Facts follow it, for who reads lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = _message(record) + "".join(f" {key}={value}" for key, value in _facts(record).items())
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _handler(config: LoggingConfig, program: str) -> logging.Handler:
    stream = logging.StreamHandler(sys.stderr)
    connected = is_connected(os.environ.get("JOURNAL_STREAM"), 2)
    if config.format == "json":
        stream.setFormatter(JsonFormatter())
        return stream
    stream.setFormatter(TextFormatter(connected))
    if not connected:
        return stream
    journal = JournalHandler(program, _facts, stream)
    journal.setFormatter(MessageFormatter())
    return journal


def set_up_logging(config: LoggingConfig, program: str = "syshaxd") -> None:
    """Replaces whatever was set up before; safe to call again when the configuration changes. program: as the journal
    names us."""
    root = logging.getLogger()
    for old in root.handlers:
        if isinstance(old, JournalHandler):
            old.close()
    root.handlers[:] = [_handler(config, program)]
    root.setLevel(config.level.upper())
    # Nobody reads these, and finding them costs every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
