"""Facts about the tree that are easy to check by machine: file sizes, openings, words that must not appear.

Part of `make check`. Prints one line for each fault and exits 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = {".py", ".cc", ".c", ".h", ".inc", ".pyi", ".sh"}
MAX_LINES = 500
UNFINISHED = re.compile("\\b(TO" + "DO|FIX" + "ME|XX" + "X)\\b")


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def opening(path: Path, text: str) -> bool:
    """Every source file says what it owns before its first line of code."""
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    if not first:
        return True
    if path.suffix in {".py", ".pyi"}:
        return first.startswith(('"""', 'r"""', "#"))
    return first.startswith(("/*", "//", "#!"))


def faults(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    found = []
    if path.suffix in SOURCE:
        lines = text.count("\n")
        if lines > MAX_LINES:
            found.append(f"{lines} lines, more than {MAX_LINES}")
        if not opening(path, text):
            found.append("does not open with what it owns")
        if (match := UNFINISHED.search(text)) is not None:
            found.append(f"unfinished: {match.group(0)}")
    if path.suffix == ".md":
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            if not (path.parent / target).exists():
                found.append(f"link to {target}, which does not exist")
    return found


def missing_guards() -> list[str]:
    """Tests that tests/GUARDS.md names and that do not exist."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "tests/GUARDS.md").read_text())
    assert named, "tests/GUARDS.md names no test"
    return [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]


def main() -> int:
    bad = 0
    for path in tracked():
        for fault in faults(path):
            print(f"{path.relative_to(ROOT)}: {fault}")
            bad += 1
    for test in missing_guards():
        print(f"tests/GUARDS.md: {test} does not exist")
        bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
