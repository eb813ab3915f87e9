#!/bin/env -S PYTHONPATH=/usr/lib64/syshax/python:/usr/lib64/syshax/vendor /usr/bin/python3 -s
"""Runs as root in the two-node machine: starts the installed daemon in several ways and writes down what can be seen of
its memory and its threads, as /xchg/facts.json. Judging is the test's part (test_two_nodes.py).

Models lie in /srv/models: `small` (fits anywhere) and `big` (more than the limits set here).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from syshax.control import Control
from syshax.errors import DaemonAbsentError, SyshaxError
from syshax.protocol import LoadRequest, ModelInfo, StatusAnswer

OUT = Path("/xchg")
CONFIG = Path("/etc/syshax/syshaxd.toml.d/test.toml")
DROP_IN = Path("/run/systemd/system/syshaxd.service.d/test.conf")
PACKAGES, PROGRAMS = "/usr/lib64/syshax/python:/usr/lib64/syshax/vendor", "/usr/local/lib/syshax-tests"
LIMIT = 144 << 20
facts: dict[str, Any] = {}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stdout}{done.stderr}\n{journal()}")
    return done.stdout.strip()


def journal() -> str:
    words = ["journalctl", "--no-pager", "-o", "cat", "-u", "syshaxd.service"]
    return subprocess.run(words, capture_output=True, text=True).stdout[-4000:]


def step(text: str) -> None:
    print(f"{time.monotonic():.0f} s: {text}", flush=True)


def start(config: str, unit: str = "") -> Control:
    """The daemon with this configuration and these settings of its unit, and without models of before."""
    run("systemctl", "stop", "syshaxd.service")
    CONFIG.write_text(config)
    DROP_IN.parent.mkdir(parents=True, exist_ok=True)
    # No clock of the unit's is right here: everything is emulated.
    DROP_IN.write_text(f"[Service]\nTimeoutStartSec=infinity\nWatchdogSec=0\n{unit}\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "syshaxd.service")
    return Control(None, 120)


def load(control: Control, name: str) -> dict[str, Any]:
    """The model when its load has ended, or the error."""
    try:
        control.post("/v1/models", LoadRequest(name=name, path=f"/srv/models/{name}", format="bf16"), ModelInfo)
        while (info := control.get(f"/v1/models/{name}", ModelInfo)).state == "loading":
            time.sleep(0.2)
    except DaemonAbsentError:
        raise
    except SyshaxError as error:
        return {"state": "refused", "code": error.code, "message": error.message, "hint": error.hint}
    return {"state": info.state.value, "reason": info.reason}


def main_pid() -> int:
    return int(run("systemctl", "show", "-p", "MainPID", "--value", "syshaxd.service"))


def node_lists(what: str) -> dict[str, str]:
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {node.name.removeprefix("node"): (node / what).read_text().strip() for node in nodes}


def free_huge_pages() -> dict[str, int]:
    return {node: int(text) for node, text in node_lists("hugepages/hugepages-2048kB/free_hugepages").items()}


def arenas(pid: int) -> list[dict[str, Any]]:
    """Every mapping of weights: bytes on each node, kind of pages, bytes mapped as huge pages."""
    found = {}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if "memfd:" not in line:
            continue
        page = int(re.search(r"kernelpagesize_kB=(\d+)", line)[1]) * 1024  # type: ignore[index]
        nodes = {node: int(pages) * page for node, pages in re.findall(r" N(\d+)=(\d+)", line)}
        found[line.split()[0]] = {"page": page, "nodes": nodes, "policy": line.split()[1], "file": line.split()[2]}
    huge = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            huge = match[1]
        elif line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")) and huge in found:
            found[huge]["transparent"] = found[huge].get("transparent", 0) + int(line.split()[1]) * 1024
    return list(found.values())


def threads(pid: int) -> list[dict[str, str]]:
    rows = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        rows.append(
            {"name": status["Name"], "cpus": status["Cpus_allowed_list"], "memory": status["Mems_allowed_list"]}
        )
    return rows


def seen(control: Control) -> dict[str, Any]:
    pid = main_pid()
    status = control.get("/v1/status", StatusAnswer)
    return {
        "nodes": [node.model_dump() for node in status.nodes],
        "arenas": arenas(pid),
        "threads": threads(pid),
        "free_huge_pages": free_huge_pages(),
    }


def answered(out: str) -> None:
    words = ["/usr/bin/python3", "-s", f"{PROGRAMS}/inside_requests.py", "small", str(OUT / out), "--requests", "2"]
    run("env", f"PYTHONPATH={PACKAGES}", *words)


def reserved_huge_pages() -> None:
    facts["free_huge_pages"] = free_huge_pages()
    control = start('[compute]\nhuge_pages = "require"\n')
    facts["require"] = {"load": load(control, "small"), **seen(control)}
    answered("answers.npz")


def transparent_huge_pages_and_a_memory_limit() -> None:
    control = start('[compute]\nhuge_pages = "auto"\n[memory]\nreserve = "1MiB"\n')
    facts["auto"] = {"load": load(control, "small"), **seen(control)}
    run("systemctl", "set-property", "--runtime", "syshax.slice", f"MemoryMax={LIMIT}")
    pid = main_pid()
    refused = load(control, "big")
    small = control.get("/v1/models/small", ModelInfo).state.value
    facts["memory_limit"] = {"small": small, "big": refused, "same_process": main_pid() == pid}
    run("systemctl", "set-property", "--runtime", "syshax.slice", "MemoryMax=infinity")


def one_node() -> None:
    """What docs/DEPLOYMENT.md shows: it holds on both hierarchies of control groups."""
    control = start('[memory]\nreserve = "1MiB"\n', "CPUAffinity=numa\nNUMAPolicy=bind\nNUMAMask=1")
    facts["one_node"] = {"load": load(control, "small"), **seen(control)}


def memory_lock() -> None:
    """A worker's page lock, with mlock in the driver's place, under no limit and under one smaller than its ring."""
    program = (
        "import ctypes, json, mmap, resource\n"
        "from syshax.errors import SyshaxError\n"
        "from syshax.vllm.page_lock import PageLock\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def register(address, size):\n"
        "    return libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) and ctypes.get_errno()\n"
        "def unregister(address):\n"
        "    return libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(8 << 20))\n"
        "ring = mmap.mmap(-1, 8 << 20)\n"
        "def attempt():\n"
        "    try:\n"
        "        address = ctypes.addressof(ctypes.c_char.from_buffer(ring))\n"
        "        PageLock(address, 8 << 20, register, unregister).release()\n"
        "        return 'locked'\n"
        "    except SyshaxError as error:\n"
        "        return f'{error.message}\\n{error.hint}'\n"
        "said = [attempt()]\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "print(json.dumps([*said, attempt()]))\n"
    )
    said = run("systemd-run", "--quiet", "--wait", "--pipe", "--uid=syshax", "-p", "LimitMEMLOCK=infinity",
               "-E", f"PYTHONPATH={PACKAGES}", "/usr/bin/python3", "-sc", program)  # fmt: skip
    facts["memory_lock"] = dict(zip(("unlimited", "limited"), json.loads(said), strict=True))


def main() -> int:
    run("systemd-sysusers")
    run("systemd-tmpfiles", "--create", "/usr/lib/tmpfiles.d/syshax.conf")
    run("systemctl", "start", "syshaxd.socket")
    facts["cgroup"] = run("stat", "-fc", "%T", "/sys/fs/cgroup")
    facts["cpus"] = node_lists("cpulist")
    for part in (memory_lock, reserved_huge_pages, transparent_huge_pages_and_a_memory_limit, one_node):
        step(part.__name__)
        part()
        (OUT / "facts.json").write_text(json.dumps(facts, indent=1))
    step("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
