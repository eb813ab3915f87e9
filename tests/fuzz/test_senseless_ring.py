"""The client's side of a ring whose header makes no sense: refused or served, never a crash and never a hang. The fuzz
target `client` (target_client.cc) tries millions of headers; here are the ways in that only Python takes."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ring_harness import FakeDaemon

from syshax.errors import DaemonLostError, SyshaxError
from syshax.protocol import AttachRequest
from syshax.ring import Ring
from syshax.session import attach
from syshaxd import _core

OPEN_AND_ASK = """
import os, socket, sys
from syshax.errors import SyshaxError
from syshax.ring import Ring
memory = os.memfd_create("ring")
os.write(memory, bytes.fromhex(sys.argv[1]).ljust(int(sys.argv[2]), b"\\0"))
near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    ring = Ring(memory, os.eventfd(0), near)
except SyshaxError as error:
    print(error.code)
else:
    slot = ring.acquire(0.1)
    try:
        slot.submit(0, 1, 1, 0)
        slot.wait(0.05)
    except SyshaxError as error:
        print(error.code)
    ring.close()
"""


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="sx") as folder, FakeDaemon(Path(folder), spin_us=0xFFFFFFFF) as daemon:
        yield daemon


def test_a_lost_daemon_is_noticed_whatever_the_header_says_of_spinning(daemon: FakeDaemon) -> None:
    """More than an hour, by the header; the connection is looked at all the same."""
    session = attach(daemon.runtime_dir, AttachRequest(model="tiny", max_tokens=4), 10)
    slot = session.ring.acquire(1)
    daemon.harness.hold()
    slot.submit(0, 1, 1, 0)
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(DaemonLostError):
            slot.wait(None)
        ended.append(time.monotonic())

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.2)
    cut = time.monotonic()
    daemon.cut()
    waiting.join(10)
    assert ended and ended[0] - cut < 2


@given(st.binary(max_size=400), st.integers(0, 3 * 4096))
def test_any_header_is_refused(header: bytes, size: int) -> None:
    """Random bytes never have the magic."""
    memory = os.memfd_create("ring")
    os.write(memory, header)
    os.ftruncate(memory, size)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far, pytest.raises(SyshaxError):
        Ring(memory, os.eventfd(0), near)


def test_offsets_beyond_the_end_of_numbers_are_refused() -> None:
    """In a process of its own: the library once wrote 64 bytes before its mapping here."""
    layout = _core.TestHarness(1, 2, 16, 1).layout(1, 1, 4, 1)
    header = bytearray(320)
    struct.pack_into("<IHH", header, 0, 0x58485353, 1, 1)
    struct.pack_into("<IIIIII", header, 32, 1, 1, 16, 1, 4, 1)
    offsets = (layout["requests_offset"], layout["completions_offset"], layout["slots_offset"], layout["slot_bytes"],
               layout["ids_offset"], layout["weights_offset"], layout["output_offset"],
               layout["total_bytes"])  # fmt: skip
    struct.pack_into("<8Q", header, 56, *offsets)
    beyond = [(56, 2**64 - 64), (56, 2**64 - 4096), (64, 2**64 - 4096), (96, 2**64 - 4096)]
    for offset, value, expected in [(56, offsets[0], "timeout"), *((*place, "version") for place in beyond)]:
        changed = bytearray(header)
        struct.pack_into("<Q", changed, offset, value)
        done = subprocess.run([sys.executable, "-c", OPEN_AND_ASK, changed.hex(), str(layout["total_bytes"])],
                              capture_output=True, text=True, timeout=30, check=False)  # fmt: skip
        assert done.returncode == 0 and done.stdout.strip() == expected, (offset, value, done.stdout, done.stderr)
