"""Page-locks a session's memory for an accelerator, in chunks, all or nothing.

One call over hundreds of GiB fails on some drivers, and a partly locked mapping would be worse than none: a copy that
spans the border is refused. Not run on a device by this project's tests (no machine of theirs has one); the tests
run the chunking and the rollback against a recorder.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import TYPE_CHECKING

from syshax.errors import NoMemoryError

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 30
REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: locked for every context of the process."""


class PageLock:
    """Holds [base, base + bytes) locked until `release`.

    `register(address, bytes)` and `unregister(address)` return 0 or the driver's error number. Raises NoMemoryError,
    with everything undone, where a chunk is refused.
    """

    def __init__(
        self,
        base: int,
        size: int,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._unregister = unregister
        self._locked: list[int] = []
        for offset in range(0, size, chunk_bytes):
            status = register(base + offset, min(chunk_bytes, size - offset))
            if status != 0:
                self.release()
                limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
                raise NoMemoryError(
                    f"the device's driver refused (error {status}) to page-lock bytes {offset} to "
                    f"{min(offset + chunk_bytes, size)} of {size}; the memlock limit is {shown}",
                    "raise it: LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`",
                )
            self._locked.append(base + offset)

    def release(self) -> None:
        """Unlocks what is locked, last first. A driver that is going down may refuse; nothing can be done then."""
        while self._locked:
            self._unregister(self._locked.pop())


def page_lock_for(device: torch.device, base: int, size: int) -> PageLock | None:
    """The lock for that device; None where its runtime has no such call (copies then go through pageable memory)."""
    if device.type != "cuda":  # HIP builds of torch call themselves cuda too
        return None
    import torch

    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, size: int) -> int:
        return int(runtime.cudaHostRegister(address, size, REGISTER_PORTABLE))

    def unregister(address: int) -> int:
        return int(runtime.cudaHostUnregister(address))

    return PageLock(base, size, register, unregister)
