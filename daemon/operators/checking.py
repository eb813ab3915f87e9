"""Runs the conformance checks of an operator library in a process of its own, so that a library which crashes or hangs
is a finding and not the end.

Owns that process and the records that it sends. What is checked is the core's (csrc/kernels/conformance.h).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from syshax.errors import SyshaxError
from syshaxd.core import compiled_core
from syshaxd.operators.libraries import load_library

State = Literal["passed", "failed", "not run"]
HANGS_SECONDS = 300.0
"""A check that takes longer is ended."""


class Record(TypedDict):
    """One check of one row. `text`: what is wrong, or a figure."""

    row: str
    check: str
    state: State
    text: str


def check_library(library: Path) -> Iterator[Record]:
    """The records of all checks, as they are made; the first is the library's own loading."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "syshaxd.operators.checking", str(library), str(writer)]
    with subprocess.Popen(command, pass_fds=[writer]) as process:
        os.close(writer)
        try:
            yield from _records(reader, process)
        finally:
            process.kill()
            os.close(reader)


def _records(reader: int, process: subprocess.Popen[bytes]) -> Iterator[Record]:
    running: Record | None = {"row": "library", "check": "load", "state": "failed", "text": ""}
    pending = b""
    while True:
        if not select.select([reader], [], [], HANGS_SECONDS)[0]:
            if running:
                yield {**running, "state": "failed", "text": f"did not end within {HANGS_SECONDS:g} s"}
            return
        data = os.read(reader, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            record = json.loads(line)
            if record["state"] == "begun":
                running = record
            else:
                running = None
                yield cast(Record, record)
    code = process.wait()
    if code:
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        where = running or {"row": "library", "check": "end", "state": "failed", "text": ""}
        touched = ": it touched memory that is not its own" if code in (-signal.SIGSEGV, -signal.SIGBUS) else ""
        yield {**where, "state": "failed", "text": f"ended the process ({how}){touched}"}


def _run_all(library: Path, send: Any) -> None:
    """In the process of its own."""
    core = cast(Any, compiled_core())
    try:
        loaded = load_library(core, library)
    except SyshaxError as error:
        send("library", "load", "failed", error.message)
        return
    rows = ", ".join(loaded.formats + loaded.kernels)
    send("library", "load", "passed" if rows else "failed", rows or "it has no formats and no kernels")
    usable = {row["name"]: row for row in core.kernels()}
    checks = core.operator_checks()
    jobs = [("format", name, check) for name in loaded.formats for check in checks["format"]]
    for name in loaded.kernels:
        if usable[name]["usable"]:
            jobs += [("kernel", name, check) for check in checks["kernel"]]
        else:
            send(name, "all", "not run", f"this CPU lacks what it needs: {', '.join(usable[name]['features'])}")
    for kind, name, check in jobs:
        send(name, check, "begun", "")
        ok, text = core.check_operator(kind, name, check)
        send(name, check, "passed" if ok else "failed", text)


def main() -> None:
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as pipe:

        def send(row: str, check: str, state: str, text: str) -> None:
            pipe.write(json.dumps({"row": row, "check": check, "state": state, "text": text}) + "\n")

        _run_all(Path(sys.argv[1]), send)


if __name__ == "__main__":
    main()
