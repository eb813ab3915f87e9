"""Runs inside the box: holds one thread of a process still until the process ends.

inside_stop_thread.py PID THREAD_NAME
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

PTRACE_CONT, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 0x4206, 0x4207
ALL_THREADS = 0x40000000  # __WALL


def ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x})")


def main() -> None:
    pid, name = int(sys.argv[1]), sys.argv[2]
    threads = [
        int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text().strip() == name
    ]
    assert len(threads) == 1, f"{len(threads)} threads are called {name}"
    thread = threads[0]
    ptrace(PTRACE_SEIZE, thread)
    while True:
        ptrace(PTRACE_INTERRUPT, thread)
        os.waitpid(thread, ALL_THREADS)
        if Path(f"/proc/{pid}/task/{thread}/syscall").read_text().startswith("-1"):
            break
        ptrace(PTRACE_CONT, thread)
        time.sleep(0.0007)
    print("holding it", flush=True)
    while os.WIFSTOPPED(os.waitpid(thread, ALL_THREADS)[1]):
        pass


if __name__ == "__main__":
    main()
