"""`syshaxd bench ring`: a client process to the data plane and back, with a model that computes nothing.

Owns which CPUs the two sides take; the measuring is the core's (csrc/bench/ring.cc).
"""

from __future__ import annotations

import os

from syshax.errors import HardwareError, InvalidArgumentError
from syshaxd import _core

MEANINGS = {
    "spin_us_p50": "there and back while both sides look",
    "spin_us_p99": "the same, one in a hundred takes longer",
    "floor_spin_us": "a bare word in shared memory",
    "parked_us_p50": "there and back when the daemon sleeps",
    "floor_parked_us": "two bare eventfds",
}


def run(seconds: float, payload_bytes: int, client_cpu: int, daemon_cpu: int) -> dict[str, float]:
    """Microseconds by the names of MEANINGS. A CPU of -1 is chosen here: two different ones where there are two.

    Raises HardwareError for a CPU that this process may not use, InvalidArgumentError for sizes and times out of range.
    """
    allowed = sorted(os.sched_getaffinity(0))
    for cpu in (client_cpu, daemon_cpu):
        if cpu != -1 and cpu not in allowed:
            raise HardwareError(f"CPU {cpu} may not be used here", f"allowed are {','.join(map(str, allowed))}")
    client = allowed[0] if client_cpu == -1 else client_cpu
    daemon = allowed[-1] if daemon_cpu == -1 else daemon_cpu
    try:
        return _core.bench_ring(seconds, payload_bytes, client, daemon)
    except _core.CoreError as error:
        raise InvalidArgumentError(str(error), error.hint) from error
