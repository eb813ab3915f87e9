"""Rules for the whole suite: in CI a skipped test is a failure and properties try the same examples each time;
nothing may stay behind in /dev/shm.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

SHM = Path("/dev/shm")

# They need root and a container with a systemd of its own: `make system-test`.
collect_ignore = [] if os.environ.get("SYSHAX_SYSTEM_TESTS") else ["system"]
# They need Chromium: `make test-web`.
collect_ignore += [] if os.environ.get("SYSHAX_WEB_TESTS") else ["web"]

# CI tries the same examples each time; elsewhere every run looks at new ones. Time limits belong to no property here.
settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "explore")

# Daemons of tests leave the user's cache alone; tests of the cache name a directory.
os.environ["SYSHAX_CACHE_ENABLED"] = "false"

# Whoever starts the suite in a shell's background has SIGINT ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _segments() -> set[str]:
    return {entry.name for entry in SHM.iterdir() if "syshax" in entry.name}


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_shm() -> Iterator[None]:
    before = _segments()
    yield
    left = _segments() - before
    assert not left, f"left in /dev/shm: {sorted(left)}"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if skipped and os.environ.get("CI"):
        reporter.write_line(f"CI allows no skips: {len(skipped)} skipped", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
