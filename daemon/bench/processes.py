"""A measured Python process with pipes to it, which ends with the measurement whatever happens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import IO

_END_SECONDS = 20.0


def start(
    stack: ExitStack,
    module: str,
    *words: str,
    stderr: IO[str] | int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """`python -m module words...`; told to end, then killed, when `stack` closes. stderr: None is ours."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
