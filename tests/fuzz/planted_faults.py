"""Are the fuzz targets worth their time? Plants one fault after another into a copy of the sources, each a kind of
mistake that the design forbids, and demands that a target finds it within its time.

    planted_faults.py [--seconds S]

Part of the long `make fuzz`. Builds with the C++ compiler alone, without sanitizers: what a target finds here it
finds by its own checks, or by the crash. Prints a line for each fault; exit status 1 when one stays unfound.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [
    "*.cc",
    "base/xxh64.cc",
    "ipc/ring_server.cc",
    "ipc/sigbus_guard.cc",
    "ipc/guarded_file.cc",
    "memory/packed_file.cc",
]
EXCLUDED = {"runtime.cc"}


@dataclass(frozen=True)
class Fault:
    """In `file`, `right` becomes `wrong`; `target` must find it."""

    what: str
    file: str
    right: str
    wrong: str
    target: str


FAULTS = [
    Fault("expert ids are not checked", "session.cc", "> geometry_.num_experts)", "> 0xFFFFFFFEu)", "dispatcher"),
    Fault(
        "an id one too large passes",
        "session.cc",
        "+ 1u > geometry_.num_experts",
        "> geometry_.num_experts",
        "dispatcher",
    ),
    Fault(
        "num_tokens is not checked",
        "session.cc",
        "r.num_tokens > h.max_tokens",
        "r.num_tokens > 0xFFFFFFF0u",
        "dispatcher",
    ),
    Fault(
        "a layer one too far passes", "session.cc", "r.layer >= h.num_layers", "r.layer > h.num_layers", "dispatcher"
    ),
    Fault(
        "a slot one too far passes",
        "session.cc",
        "request.slot >= ring_.layout().num_slots",
        "request.slot > ring_.layout().num_slots",
        "dispatcher",
    ),
    Fault(
        "slots are found by the offsets in shared memory",
        "ipc/ring_server.cc",
        "uint8_t* begin = base_ + layout_.slots_offset",
        "uint8_t* begin = base_ + header()->slots_offset",
        "ring",
    ),
    Fault(
        "submit_tail is believed",
        "session.cc",
        "if (pending > ring_.layout().num_slots) {",
        "if (pending > 0xFFFFFFF0u) {",
        "dispatcher",
    ),
    Fault(
        "truncated memory is not guarded",
        "ipc/sigbus_guard.cc",
        "if (memory_error || !replace_with_zeros",
        "if (true || !replace_with_zeros",
        "ring",
    ),
    Fault(
        "a client's offset wraps",
        "ipc/client_parts.h",
        "begin <= end && size <= end - begin",
        "begin + size <= end",
        "client",
    ),
    Fault(
        "a page too few for a slot",
        "ipc/ring_server.cc",
        "h.slot_bytes = 2 * (rows + wide);",
        "h.slot_bytes = 2 * (rows + wide) - SYSHAX_RING_PAGE;",
        "layout",
    ),
]


def build(folder: Path, fault: Fault | None) -> Path:
    """The fuzz program from a copy of the sources with that fault."""
    copy = folder / "csrc"
    shutil.copytree(ROOT / "csrc", copy)
    if fault is not None:
        path = copy / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(
                f"{fault.what}: {fault.file} holds {fault.right!r} {text.count(fault.right)} times, not once"
            )
        path.write_text(text.replace(fault.right, fault.wrong))
    flags = ["-g", "-O1", "-w", "-pthread", f"-I{copy}", f"-I{copy / 'include'}"]
    subprocess.run(["cc", "-std=gnu11", "-c", *flags, copy / "ipc/client.c", "-o", folder / "client.o"], check=True)
    sources = [path for pattern in SOURCES for path in copy.glob(pattern) if path.name not in EXCLUDED]
    fuzz = [path for path in (ROOT / "tests/fuzz").glob("*.cc") if path.name != "libfuzzer.cc"]
    program = folder / "ring_fuzz"
    subprocess.run(
        ["c++", "-std=c++17", *flags, *sources, *fuzz, folder / "client.o", "-o", program, "-ldl"], check=True
    )
    return program


def found(program: Path, target: str, seconds: float) -> tuple[bool, float, str]:
    begin = time.monotonic()
    done = subprocess.run(
        [program, target, "--seconds", str(seconds), "--count", "100000000"],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("WRONG")]
    return done.returncode != 0, time.monotonic() - begin, lines[0] if lines else f"status {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="that a target has for a fault")
    seconds = parser.parse_args().seconds
    unfound = 0
    for fault in FAULTS:
        with tempfile.TemporaryDirectory(prefix="sxf") as folder:
            program = build(Path(folder), fault)
            wrong, took, words = found(program, fault.target, seconds)
        print(
            f"{'found' if wrong else 'NOT FOUND':9} after {took:5.1f} s by {fault.target:10}: {fault.what} ({words})",
            flush=True,
        )
        unfound += not wrong
    return 1 if unfound else 0


if __name__ == "__main__":
    sys.exit(main())
