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
    "*.cc", "schedule/*.cc", "ipc/ring_server.cc", "ipc/sigbus_guard.cc", "ipc/guarded_file.cc", "ipc/client.c",
    "memory/packed_file.cc", "base/xxh64.cc",
]  # fmt: skip
EXCLUDED = {"runtime.cc"}


@dataclass(frozen=True)
class Fault:
    """In `file`, `right` becomes `wrong`; `target` must find it."""

    what: str
    file: str
    right: str
    wrong: str
    target: str
    compiled: str = ""
    """The source that is compiled when `file` is a header of its own."""


FAULTS = [
    Fault("expert ids are not checked", "session.cc", "> geometry_.num_experts)", "> 0xFFFFFFFEu)", "dispatcher"),
    Fault(
        "an id one too large passes",
        "session.cc",
        "+ 1u > geometry_.num_experts)",
        "+ 1u > geometry_.num_experts + 1u)",
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
        "ipc/client.c",
    ),
    Fault(
        "a page too few for a slot",
        "ipc/ring_server.cc",
        "h.slot_bytes = 2 * (rows + wide);",
        "h.slot_bytes = 2 * (rows + wide) - SYSHAX_RING_PAGE;",
        "layout",
    ),
]


class Workshop:
    """A copy of the sources and its objects; a fault costs the compilation of one file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._copy = folder, folder / "csrc"
        shutil.copytree(ROOT / "csrc", self._copy)
        sources = [
            path for pattern in SOURCES for path in sorted(self._copy.glob(pattern)) if path.name not in EXCLUDED
        ]
        sources += [path for path in sorted((ROOT / "tests/fuzz").glob("*.cc")) if path.name != "libfuzzer.cc"]
        self._objects = {source: folder / f"{number}.o" for number, source in enumerate(sources)}
        for source in sources:
            self._compile(source)

    def _compile(self, source: Path) -> None:
        language = ["cc", "-std=gnu11"] if source.suffix == ".c" else ["c++", "-std=c++17"]
        flags = ["-g", "-O1", "-w", "-pthread", f"-I{self._copy}", f"-I{self._copy / 'include'}"]
        subprocess.run([*language, *flags, "-c", source, "-o", self._objects[source]], check=True)

    def link(self) -> Path:
        program = self._folder / "ring_fuzz"
        subprocess.run(["c++", "-pthread", *self._objects.values(), "-o", program, "-ldl"], check=True)
        return program

    def plant(self, fault: Fault) -> Path:
        """The program with that fault; mend() takes it out again."""
        path = self._copy / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(
                f"{fault.what}: {fault.file} holds {fault.right!r} {text.count(fault.right)} times, not once"
            )
        path.write_text(text.replace(fault.right, fault.wrong))
        self._compile(self._copy / (fault.compiled or fault.file))
        return self.link()

    def mend(self, fault: Fault) -> None:
        shutil.copy(ROOT / "csrc" / fault.file, self._copy / fault.file)
        self._compile(self._copy / (fault.compiled or fault.file))


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
    parser.add_argument("--seconds", type=float, default=180.0, help="that a target has for a fault")
    seconds = parser.parse_args().seconds
    unfound = 0
    with tempfile.TemporaryDirectory(prefix="sxf") as folder:
        workshop = Workshop(Path(folder))
        for target in sorted({fault.target for fault in FAULTS}):
            if found(workshop.link(), target, 1)[0]:
                raise SystemExit(f"{target} finds something before anything is planted")
        for fault in FAULTS:
            wrong, took, words = found(workshop.plant(fault), fault.target, seconds)
            workshop.mend(fault)
            unfound += not wrong
            result = "found" if wrong else "NOT FOUND"
            print(f"{result:9} after {took:5.1f} s by {fault.target:10}: {fault.what} ({words})", flush=True)
    return 1 if unfound else 0


if __name__ == "__main__":
    sys.exit(main())
