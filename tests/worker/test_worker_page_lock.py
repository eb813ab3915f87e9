"""Page-locking in chunks: covers the mapping exactly, and a refusal undoes everything."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import NoMemoryError
from syshax.vllm.page_lock import PageLock

ROOT = Path(__file__).parent.parent.parent


class Driver:
    """Records what is locked; refuses the call number `refuse`."""

    def __init__(self, refuse: int = -1) -> None:
        self.locked: dict[int, int] = {}
        self.calls, self.refuse = 0, refuse

    def register(self, address: int, size: int) -> int:
        assert size > 0 and address not in self.locked
        self.calls += 1
        if self.calls - 1 == self.refuse:
            return 2
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@given(size=st.integers(1, 10_000), chunk=st.integers(1, 3_000))
def test_chunks_cover_the_mapping(size: int, chunk: int) -> None:
    driver = Driver()
    lock = PageLock(4096, size, driver.register, driver.unregister, chunk)
    end = 4096
    for address, length in sorted(driver.locked.items()):
        assert address == end and length <= chunk
        end = address + length
    assert end == 4096 + size
    lock.release()
    assert driver.locked == {}
    lock.release()


@given(size=st.integers(1, 10_000), chunk=st.integers(500, 3_000), refuse=st.integers(0, 19))
def test_a_refusal_undoes_everything(size: int, chunk: int, refuse: int) -> None:
    driver = Driver(refuse)
    if refuse >= -(-size // chunk):
        PageLock(0, size, driver.register, driver.unregister, chunk)
        return
    with pytest.raises(NoMemoryError, match=r"error 2.*memlock limit"):
        PageLock(0, size, driver.register, driver.unregister, chunk)
    assert driver.locked == {}


def test_a_low_memlock_limit_is_named_with_value_and_remedy_and_the_units_raise_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        with pytest.raises(NoMemoryError) as error:
            PageLock(0, 8192, Driver(refuse=0).register, Driver().unregister)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert "page-lock bytes 0 to 8192 of 8192; the memlock limit is 65536 bytes" in error.value.message
    assert "LimitMEMLOCK=infinity" in error.value.hint and "ulimit -l unlimited" in error.value.hint
    for unit in ("syshaxd.service", "syshax-worker@.service"):
        assert "\nLimitMEMLOCK=infinity\n" in (ROOT / "systemd" / unit).read_text()
