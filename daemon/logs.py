"""Log lines on standard error: text for people, JSON for collectors, journald's priorities where it listens.

Owns the two formats. Modules log through logging.getLogger(__name__) and give facts as `extra={...}`; nothing here or
there logs weights, prompts or keys.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

from syshaxd.config import LoggingConfig

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class TextFormatter(logging.Formatter):
    """One line: time, level, message, facts as key=value. Under journald its priority instead of time and level."""

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={value}" for key, value in _facts(record).items())
        text = record.getMessage().replace("\n", "\\n") + facts
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journal:
            prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
            return "\n".join(prefix + line for line in text.splitlines())
        return f"{_time(record)} {record.levelname.lower()}: {text}"


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


def set_up_logging(config: LoggingConfig) -> None:
    """Replaces whatever was set up before; safe to call again when the configuration changes."""
    handler = logging.StreamHandler(sys.stderr)
    journal = "JOURNAL_STREAM" in os.environ
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter(journal))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
