"""The rule for spinning (csrc/base/spin.h) on clocks that a test makes: how much is spun in vain, when it rests, that
it keeps on where spinning pays."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CSRC = Path(__file__).parent.parent.parent / "csrc"
FIXED = 1 << 31
LOOK_NS, GAP_NS, WAKE_NS = 1_000, 100_000, 20_000
START_NS = 10**15

SHIM = """
#include "base/spin.h"
unsigned long size(void) { return sizeof(struct syshax_spin); }
int again(struct syshax_spin* s, uint32_t us, uint64_t now) { return syshax_spin_again(s, us, now); }
void found(struct syshax_spin* s, uint64_t now) { syshax_spin_found(s, now); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("spin")
    (folder / "shim.c").write_text(SHIM)
    command = ["cc", "-std=gnu11", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{CSRC}"]
    subprocess.run([*command, str(folder / "shim.c"), "-o", str(folder / "shim.so")], check=True)
    loaded = ctypes.CDLL(str(folder / "shim.so"))
    loaded.size.restype = ctypes.c_ulong
    loaded.again.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]
    loaded.found.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return loaded


@dataclass
class Wait:
    """One wait: what it waits for comes after `length_ns`; the thread loses the CPU for `lost_ns` at its third look."""

    length_ns: int
    lost_ns: int = 0
    before_ns: int = 100_000


class Waiter:
    """A thread that waits as the pool, the dispatcher and the client do, on a clock of its own."""

    def __init__(self, library: ctypes.CDLL, spin_us: int) -> None:
        self.library, self.spin_us, self.now = library, spin_us, START_NS
        self.state = ctypes.create_string_buffer(library.size())
        self.vain_ns = self.earned_ns = 0

    def wait(self, wait: Wait) -> int:
        """Nanoseconds spun."""
        self.now += wait.before_ns
        begin, looks = self.now, 0
        while self.library.again(self.state, self.spin_us, self.now):
            looks += 1
            self.now += LOOK_NS + (wait.lost_ns if looks == 3 else 0)
            if self.now - begin >= wait.length_ns:
                self.library.found(self.state, self.now)
                self.earned_ns += max(WAKE_NS, 2 * (self.now - begin))
                return self.now - begin
        spun = self.now - begin
        self.vain_ns += spun if wait.lost_ns == 0 or looks < 3 else 0
        self.now = max(self.now, begin + wait.length_ns)
        return spun


WAITS = st.builds(
    Wait,
    length_ns=st.integers(0, 3_000_000),
    lost_ns=st.just(0) | st.integers(0, 10_000_000),
    before_ns=st.integers(0, 5_000_000),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(WAITS, max_size=60), st.integers(0, 2000))
def test_what_is_spun_in_vain_is_bounded(library: ctypes.CDLL, waits: list[Wait], spin_us: int) -> None:
    waiter = Waiter(library, spin_us)
    for wait in waits:
        waiter.wait(wait)
        passed = waiter.now - START_NS
        most = 3 * spin_us * 1000 + waiter.earned_ns + passed // 100 + len(waits) * LOOK_NS
        assert waiter.vain_ns <= most


@settings(deadline=None, max_examples=30)
@given(st.integers(5, 2000), st.data())
def test_it_keeps_on_where_it_pays(library: ctypes.CDLL, spin_us: int, data: st.DataObject) -> None:
    """Every wait that is short enough, of lengths that differ by less than four, is spun to its end."""
    waiter = Waiter(library, spin_us)
    least = data.draw(st.integers(1, spin_us - 2))
    for length_us in data.draw(st.lists(st.integers(least, min(3 * least, spin_us - 2)), min_size=1, max_size=40)):
        assert waiter.wait(Wait(length_us * 1000)) >= length_us * 1000


@settings(deadline=None, max_examples=30)
@given(st.integers(50, 2000), st.integers(2 * GAP_NS, 15_000_000))
def test_it_rests_after_the_cpu_was_lost_and_tries_again(library: ctypes.CDLL, spin_us: int, lost_ns: int) -> None:
    """Four times as long as it was lost, and longer when it is lost again soon, but not for ever."""
    waiter = Waiter(library, spin_us)
    rests = []
    for _ in range(6):
        assert waiter.wait(Wait(20_000, lost_ns)) > 0
        lost_at = waiter.now
        while waiter.wait(Wait(5_000, before_ns=50_000)) == 0:
            assert waiter.now - lost_at < 8 * 8 * lost_ns + 2_000_000
        rests.append(waiter.now - lost_at)
    assert rests[0] >= 4 * lost_ns and rests == sorted(rests) and rests[-1] >= 8 * rests[0]


@pytest.mark.parametrize("spin_us", [1, 50, 1000])
def test_it_follows_a_change(library: ctypes.CDLL, spin_us: int) -> None:
    """From waits that are all in vain to waits that all end soon: spun again after a hundred times the limit."""
    waiter = Waiter(library, spin_us)
    for _ in range(300):
        waiter.wait(Wait(10_000_000))
    changed, short = waiter.now, max(1, spin_us // 2) * 1000
    while waiter.wait(Wait(short)) < short:
        assert waiter.now - changed < 110 * 1000 * spin_us + 10_000_000
    assert all(waiter.wait(Wait(short)) >= short for _ in range(20))


@given(st.integers(0, 3000), st.lists(WAITS, max_size=20))
@settings(deadline=None, max_examples=30)
def test_fixed_spinning_never_gives_way(library: ctypes.CDLL, spin_us: int, waits: list[Wait]) -> None:
    waiter = Waiter(library, FIXED | spin_us)
    for wait in waits:
        spun = waiter.wait(wait)
        assert spin_us == 0 or spun >= min(wait.length_ns, spin_us * 1000)
        assert spin_us > 0 or spun == 0
