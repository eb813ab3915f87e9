"""Runs the peers of `syshaxd.bench.peers`, each in a process of its own that may be absent, crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from syshaxd.bench.peers import PEERS

PATIENCE_SECONDS = 60.0
"""For loading, and for a point that is far slower than any that would be worth a comparison."""


@dataclass
class Comparison:
    """What was measured, and why the rest was not."""

    records: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    """"peer format" -> reason."""

    def run(self, width: int, shape: str, threads: int, tokens: Sequence[int], seconds: float) -> None:
        """All peers' formats of this width; those that were absent once are not tried again."""
        for name, peer in PEERS.items():
            for format, stored in peer.formats.items():
                if stored.width == width and f"{name} {format}" not in self.absent:
                    self._run_one(name, format, shape, threads, tokens, seconds)

    def _run_one(self, name: str, format: str, shape: str, threads: int, tokens: Sequence[int], seconds: float) -> None:
        listed = ",".join(map(str, tokens))
        command = [sys.executable, "-m", "syshaxd.bench.peers", name, format, shape, str(threads), listed, str(seconds)]
        environment = {**os.environ, **PEERS[name].environment, "OMP_NUM_THREADS": str(threads)}
        patience = PATIENCE_SECONDS + 5 * seconds * len(tokens)
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=patience, check=False
            )
            output, ended = done.stdout, ending(done.returncode, done.stderr)
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            ended = f"took more than {patience:.0f} s"
        found = parsed(output)
        self.records += [record for record in found if "ms" in record]
        reasons = [record["absent"] for record in found if "absent" in record]
        if reasons or (ended and not any("ms" in record for record in found)):
            self.absent[f"{name} {format}"] = reasons[0] if reasons else ended


def parsed(output: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines; libraries print as they like."""
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def ending(code: int, stderr: str) -> str:
    """ "" for a process that ended well, else how it ended."""
    if code == 0:
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (": this CPU lacks instructions that it needs" if name == "SIGILL" else "")
    return (stderr.strip().splitlines() or [f"ended with status {code}"])[-1]
