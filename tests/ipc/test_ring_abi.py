"""The ring's binary interface stays what it is: compiled structs, golden numbers and documentation agree."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import syshax
from syshax.protocol import Closing
from syshaxd import _core

ROOT = Path(__file__).parent.parent.parent
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "ring_abi.json").read_text())


def test_compiled_structs_match_the_golden_offsets() -> None:
    """Golden numbers change together with the version in ring_layout.h, or not at all."""
    assert json.loads(json.dumps(_core.ring_abi())) == GOLDEN


def test_fields_fill_their_structs_without_gaps() -> None:
    for struct in ("syshax_ring_request", "syshax_ring_completion", "syshax_ring_header"):
        end = 0
        for name, (offset, size) in GOLDEN[struct]["fields"].items():
            assert offset == end, f"{struct}.{name}"
            end = offset + size
        assert end == GOLDEN[struct]["size"]


def test_the_documentation_tells_the_same_offsets() -> None:
    text = (ROOT / "docs" / "RING.md").read_text()
    for struct in ("syshax_ring_request", "syshax_ring_completion", "syshax_ring_header"):
        section = text.split(f"### `{struct}`")[1].split("\n### ")[0].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", section, re.M)
        assert {name: [int(offset), int(size)] for name, offset, size in rows} == GOLDEN[struct]["fields"]
    row = r"^\| (\d) \| `SYSHAX_RING_(\w+)` \|"
    statuses = re.findall(row, text.split("\n## Statuses")[1].split("\n## ")[0], re.M)
    assert len(statuses) == 8
    for value, name in statuses:
        assert GOLDEN["constants"][name] == int(value)
    ends = re.findall(row, text.split("\n## Ends")[1].split("\n## ")[0], re.M)
    assert {name: int(value) for value, name in ends} == {end.name: end.value for end in Closing}
    assert all(GOLDEN["constants"][end.name] == end.value for end in Closing)


def library() -> Path:
    return Path(syshax.__file__).parent / "libsyshax_client.so"


def test_the_client_library_needs_libc_alone_and_an_old_one() -> None:
    dynamic = subprocess.run(["readelf", "-d", library()], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libc.so.6"]
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library().read_bytes())
    assert versions and max((int(major), int(minor)) for major, minor in versions) <= (2, 17)


def test_the_client_library_exports_its_interface_and_nothing_else() -> None:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library()], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in symbols.splitlines()}
    declared = set(re.findall(r"\b(syshax_client_\w+)\(", (ROOT / "csrc" / "ipc" / "client.h").read_text()))
    assert exported == declared
