"""Client library and dispatcher under load in one process, with the address and undefined-behaviour sanitizers where
the compiler has them."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SOURCES = [
    "dispatcher.cc",
    "session.cc",
    "schedule/fair_share.cc",
    "schedule/companions.cc",
    "ipc/ring_server.cc",
    "ipc/sigbus_guard.cc",
    "threads/pinning.cc",
]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def compile_stress(out: Path) -> Path:
    probe = out / "probe.cc"
    probe.write_text("int main() {}\n")
    can = subprocess.run(["c++", *SANITIZE, probe, "-o", out / "probe"], capture_output=True, check=False)
    flags = ["-g", "-O1", "-pthread", f"-I{CSRC}", f"-I{CSRC / 'include'}", *(SANITIZE if can.returncode == 0 else [])]
    client = out / "client.o"
    subprocess.run(["cc", "-std=gnu11", "-c", *flags, CSRC / "ipc/client.c", "-o", client], check=True)
    sources = [HERE / "ring_stress.cc", *(CSRC / source for source in SOURCES)]
    subprocess.run(["c++", "-std=c++17", *flags, *sources, client, "-o", out / "stress"], check=True)
    return out / "stress"


def test_stress(tmp_path: Path) -> None:
    done = subprocess.run([compile_stress(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    right, refused = (int(part.split()[0]) for part in done.stdout.split(","))
    assert right > 100 and refused > 0
