"""Page-locking in chunks: covers the mapping exactly, and a refusal undoes everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import NoMemoryError
from syshax.vllm.page_lock import PageLock


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
