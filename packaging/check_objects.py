"""No object file may hold instructions that its name does not announce: a build for every CPU of an architecture runs
on the least of them, and what needs more is in files named after it and chosen at run time.

    check_objects.py BUILD_FOLDER [--objdump PROGRAM]

Disassembles every object of a CMake build. Files of an ISA must also define no weak function: the linker keeps one copy
of such a function, and it may be the one that other CPUs cannot run. Part of `make check` and `make test-arm`.
Prints one line for each fault and exits 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

# Mnemonic and operands as objdump prints them -> what a CPU needs for it, first match wins. None: the architecture's
# baseline, told apart here from what looks like it.
X86_NEEDS: list[tuple[str, str]] = [
    ("avx512bf16", r"^(vdpbf16ps|vcvtne2?ps2bf16)"),
    ("avx512vnni", r"^vpdp(bu|ws)sds?\b"),
    ("amx", r"^(tdp|tile|ldtilecfg|sttilecfg)"),
    ("avx512", r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b"),
    ("avx2", r"^v(?!err|erw|mcall|mrun|mload|msave|mxo)[a-z]|%ymm"),
    ("avx2", r"^(mulx|pdep|pext|rorx|sarx|shlx|shrx|andn|bextr|blsi|blsmsk|blsr|bzhi|lzcnt)\b"),
    ("sse3 or later", r"^(pshufb|palignr|pabs|psign|pmaddubsw|phadd|pmulld|p(min|max)(sb|sd|uw|ud)|round[ps][sd])"),
    ("sse3 or later", r"^(pmov[sz]x|pins[rb]|pextr[bdq]|ptest|pblend|crc32|popcnt|dpp[sd]|insertps|extractps)"),
]
ARM_NEEDS: list[tuple[str, str]] = [
    ("armbf16", r"^bf(dot|mmla|mlal[bt]|cvt)"),
    ("i8mm", r"^(smmla|ummla|usmmla|usdot|sudot)"),
    ("dotprod", r"^[su]dot"),
    ("sve", r"\bz\d+\.[bhsd]|\bp\d+/[mz]"),
    ("atomics of armv8.1", r"^(cas|swp|ld(add|clr|set|eor|[su]max|[su]min)|st(add|clr|set))[ab]?l?[bh]?\b.*\["),
    ("half-precision arithmetic", r"^f(add|sub|mul|div|mla|mls|max|min)\b.*(\bh\d+|\.[48]h)"),
]
# A file's suffix -> all that it may need.
ALLOWED: dict[str, set[str]] = {
    "avx2": {"avx2"},
    "avx512": {"avx2", "avx512"},
    "avx512vnni": {"avx2", "avx512", "avx512vnni"},
    "avx512bf16": {"avx2", "avx512", "avx512vnni", "avx512bf16"},
    "amx": {"avx2", "avx512", "avx512vnni", "avx512bf16", "amx"},
    "neon": set(),
    "dotprod": {"dotprod"},
    "i8mm": {"dotprod", "i8mm"},
    "armbf16": {"armbf16"},
}
VECTOR_FILE_ALSO_NEEDS = {"sse3 or later"}  # every CPU with AVX2 has it
WEAK_CODE = re.compile(r"^[0-9a-f]+ .w.{5} \.text\S*\s+[0-9a-f]+\s+(?:\.hidden )?(\S+)", re.MULTILINE)


def isa_of(path: Path) -> str:
    """The suffix of `matmul_avx2.cc.o`, or "" for a file that is for every CPU."""
    suffix = path.name.split(".")[0].rpartition("_")[2]
    return suffix if suffix in ALLOWED else ""


def need_of(instruction: str, table: list[tuple[str, str]]) -> str:
    return next((need for need, pattern in table if re.search(pattern, instruction)), "")


def disassemble(objdump: str, path: Path) -> tuple[str, list[tuple[str, str]]]:
    """The object's architecture, and (function, instruction) pairs."""
    command = [objdump, "-d", "--no-show-raw-insn", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found, function = [], ""
    for line in text.splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif line.startswith(" ") and ":\t" in line:
            instruction = line.split(":\t", 1)[1].split("<")[0]
            found.append((function, re.sub(r"^(lock|rep|repz|repnz|notrack|bnd|data16) ", "", instruction).strip()))
    return ("arm" if "aarch64" in text else "x86"), found


def faults_of(objdump: str, path: Path) -> list[str]:
    isa = isa_of(path)
    allowed = ALLOWED[isa] | VECTOR_FILE_ALSO_NEEDS if isa else set()
    architecture, instructions = disassemble(objdump, path)
    table = ARM_NEEDS if architecture == "arm" else X86_NEEDS
    faults, seen = [], set()
    for function, instruction in instructions:
        need = need_of(instruction, table)
        if need and need not in allowed and need not in seen:
            seen.add(need)
            faults.append(f"needs {need}, which its name does not say: `{' '.join(instruction.split())}` in {function}")
    if isa:
        symbols = subprocess.run([objdump, "-t", str(path)], check=True, capture_output=True, text=True).stdout
        faults += [f"defines the weak function {name}, which may replace other files'" for name in
                   sorted(set(WEAK_CODE.findall(symbols)))[:3]]  # fmt: skip
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Which objects hold instructions that their names do not announce.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--objdump", default="objdump")
    arguments = parser.parse_args()
    objects = sorted(arguments.build.rglob("*.o"))
    if not any(isa_of(path) for path in objects):
        print(f"{arguments.build}: no objects of any ISA; build there first", file=sys.stderr)
        return 1
    bad = 0
    for path in objects:
        for fault in faults_of(arguments.objdump, path):
            print(f"{path.relative_to(arguments.build)}: {fault}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
