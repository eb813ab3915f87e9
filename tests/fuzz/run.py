"""`make fuzz`: hostile input of every kind until the counts below are reached, or time is up.

    run.py [short | long] [--seed N] [--minutes M]

Native targets run with sanitizers and without (short: with sanitizers alone, as long as CI has time for), under
libFuzzer too where there is clang; then the tests of tests/fuzz against a real daemon with many examples (short leaves
them to `make test`, which runs them with few). Prints a line for each; the last line says what fell short, exit
status 1 then. Programs are built by packaging/native_tests.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SANITIZED, PLAIN, LIBFUZZER = (
    ROOT / "build" / name / "ring_fuzz" for name in ("sanitize-address", "fuzz", "libfuzzer")
)
SANITIZERS = {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
DRIVER_LINE = re.compile(r"^(\w+): (\d+) inputs in ([\d.]+) s", re.MULTILINE)
LIBFUZZER_LINE = re.compile(r"^Done (\d+) runs in (\d+) second", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One target: inputs of a long run with and without sanitizers, seconds of a short one."""

    target: str
    sanitized: int
    plain: int
    short_seconds: float


ROWS = [
    Row("layout", 1_000_000, 6_000_000, 1),
    Row("ring", 150_000, 1_200_000, 4),
    Row("client", 150_000, 1_200_000, 3),
    Row("files", 50_000, 300_000, 1),
    Row("dispatcher", 20_000, 40_000, 6),
]
"""Ten million, in about an hour. A layout is one header that is read; the dispatcher's inputs are sessions with threads
of their own that wait in real time, a hundred a second."""
SOCKET_EXAMPLES = 2_000
"""Of each property in the long run; a property's example is one or more messages."""
LIBFUZZER_SECONDS = 60
LEAST_SHORT = 100
"""Inputs that a target must manage in its seconds of a short run."""


class Run:
    """What was done and what fell short."""

    def __init__(self) -> None:
        self.inputs = 0
        self.short: list[str] = []
        self.started = time.monotonic()

    def line(self, what: str, inputs: int, seconds: float) -> None:
        self.inputs += inputs
        print(
            f"{what:34} {inputs:10,} inputs {seconds:8.1f} s {inputs / max(seconds, 1e-3):9,.0f} a second", flush=True
        )

    def program(self, what: str, command: list[str], pattern: re.Pattern[str], wanted: int) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | SANITIZERS, check=False, cwd=ROOT / "build"
        )
        found = pattern.search(done.stdout + done.stderr)
        if done.returncode != 0 or found is None:
            print((done.stdout + done.stderr)[-6000:])
            self.short.append(f"{what} ended with status {done.returncode}")
            return
        inputs, seconds = (float(value) for value in found.groups()[-2:])
        self.line(what, int(inputs), seconds)
        if inputs < wanted:
            self.short.append(f"{what}: {int(inputs):,} of {wanted:,} inputs in its time")

    def end(self) -> int:
        seconds = time.monotonic() - self.started
        total = f"{self.inputs:,} inputs in {seconds:.0f} s"
        print(f"{total}; nothing fell short" if not self.short else f"{total}; FELL SHORT: {'; '.join(self.short)}")
        return 1 if self.short else 0


def native(run: Run, length: str, seed: int, seconds: float) -> None:
    """Every target; in a long run a row's time is its share of the inputs."""
    for row in ROWS:
        if length == "short":
            limit = ["--count", "100000000", "--seconds", str(row.short_seconds)]
            run.program(f"{row.target}, sanitized", [str(SANITIZED), row.target, "--seed", str(seed), *limit],
                        DRIVER_LINE, LEAST_SHORT)  # fmt: skip
            continue
        for program, name, count in ((SANITIZED, "sanitized", row.sanitized), (PLAIN, "plain", row.plain)):
            run.program(
                f"{row.target}, {name}",
                [str(program), row.target, "--seed", str(seed), "--count", str(count), "--seconds", str(seconds)],
                DRIVER_LINE,
                count,
            )


def libfuzzer(run: Run) -> None:
    if not LIBFUZZER.exists():
        print("no clang: nothing ran under libFuzzer")
        return
    for target in ("ring", "client", "dispatcher"):
        with tempfile.TemporaryDirectory() as corpus:
            subprocess.run([PLAIN, target, "--write-seeds", corpus], check=True)
            os.environ["SYSHAX_FUZZ_TARGET"] = target
            command = [str(LIBFUZZER), corpus, f"-max_total_time={LIBFUZZER_SECONDS}", "-max_len=320", "-timeout=60",
                       "-detect_leaks=0"]  # fmt: skip
            run.program(f"{target}, libFuzzer", command, LIBFUZZER_LINE, 1)


def planted(run: Run) -> None:
    command = [sys.executable, str(ROOT / "tests/fuzz/planted_faults.py")]
    if subprocess.run(command, check=False, cwd=ROOT).returncode != 0:
        run.short.append("a planted fault was not found")


def sockets(run: Run, seed: int) -> None:
    """The properties over the attach socket and the control API, each of which appends its count to a file."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        environment = {"SYSHAX_FUZZ_EXAMPLES": str(SOCKET_EXAMPLES), "SYSHAX_FUZZ_COUNTS": str(counts)}
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "7200", f"--hypothesis-seed={seed}", "tests/fuzz"]
        done = subprocess.run(command, env=os.environ | environment, check=False, cwd=ROOT)
        if done.returncode != 0:
            run.short.append(f"pytest tests/fuzz ended with status {done.returncode}")
        for line in counts.read_text().splitlines() if counts.exists() else []:
            row = json.loads(line)
            run.line(row["what"], row["inputs"], row["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("length", nargs="?", choices=["short", "long"], default="long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="the most that one target may take")
    options = parser.parse_args()
    short = ["short"] if options.length == "short" else []
    subprocess.run(["packaging/native_tests.sh", "fuzz", *short], check=True, cwd=ROOT)
    run = Run()
    native(run, options.length, options.seed, options.minutes * 60)
    if options.length == "long":
        libfuzzer(run)
        planted(run)
        sockets(run, options.seed)
    return run.end()


if __name__ == "__main__":
    sys.exit(main())
