"""A lost session is followed by another while no request comes: when it is tried, how often, what is said. Fakes only;
tests/e2e/test_idle_worker.py does the same with a real daemon."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syshax.errors import DaemonAbsentError, FingerprintError
from syshax.protocol import BOOT_FILE, Closing
from syshax.vllm import keeping

MADE: list[FakeModel] = []


class FakeModel:
    def __init__(self, number: int, boot_id: str = "first") -> None:
        MADE.append(self)
        self.session_id, self.boot_id = number, boot_id
        self.over = threading.Event()
        self.closing = Closing.OPEN

    def wait_ended(self) -> int:
        assert self.over.wait(20)
        return self.closing

    def end(self, closing: Closing) -> None:
        self.closing = closing
        self.over.set()


class FakeAttachment:
    """Answers `renew` with the errors given, then with a new session each time."""

    def __init__(self, *errors: Exception) -> None:
        self.newest: Any = FakeModel(1)
        self.errors = list(errors)
        self.tried: list[float] = []
        self.asked: list[bool] = []

    def renew(self, lost: Any, ask: bool) -> None:
        assert lost is self.newest
        self.asked.append(ask)
        self.tried.append(time.monotonic())
        if self.errors:
            raise self.errors.pop(0)
        self.newest = FakeModel(lost.session_id + 1, "later")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "syshax-keeping"}


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """serves(boot): a daemon of that boot id serves; "": none does. Pauses are a hundredth of the real ones."""
    for name in ("_PAUSE_S", "_LONGEST_S", "_LONGEST_AFTER_REFUSAL_S"):
        monkeypatch.setattr(keeping, name, getattr(keeping, name) / 100)

    def write(boot: str) -> None:
        (tmp_path / BOOT_FILE).write_text(boot)

    yield write
    for model in MADE:
        model.over.set()
    until(lambda: not threads())


@pytest.mark.parametrize("closing", [Closing.OPEN, Closing.DRAINING, Closing.STOPPED])
def test_every_loss_that_may_be_waited_out_is(tmp_path: Path, serves: Callable[[str], None], closing: Closing) -> None:
    attachment = FakeAttachment()
    serves("second")
    keeping.keep(attachment, tmp_path)
    for number in (1, 2, 3):
        attachment.newest.end(closing)
        until(lambda number=number: attachment.newest.session_id == number + 1)
        serves(f"boot {number}")
    assert len(attachment.tried) == 3


@pytest.mark.parametrize("closing", [Closing.KICKED, Closing.TRUNCATED, Closing.BROKEN_QUEUE])
def test_an_end_that_was_meant_stays(tmp_path: Path, serves: Callable[[str], None], closing: Closing) -> None:
    attachment = FakeAttachment()
    serves("second")
    before = threads()
    keeping.keep(attachment, tmp_path)
    attachment.newest.end(closing)
    until(lambda: threads() <= before)
    assert attachment.tried == []


@pytest.mark.parametrize("closing", [Closing.OPEN, Closing.STOPPED])
@pytest.mark.parametrize("boot", ["first", "second"])
def test_an_unload_is_not_undone(tmp_path: Path, serves: Callable[[str], None], boot: str, closing: Closing) -> None:
    """The daemon that ended the session is there still: the model is taken if it is ready, and not asked for."""
    attachment = FakeAttachment()
    serves(boot)
    keeping.keep(attachment, tmp_path)
    attachment.newest.end(closing)
    until(lambda: attachment.newest.session_id == 2)
    assert attachment.asked == [boot != "first"]


def test_what_is_no_error_of_ours_does_not_end_it(tmp_path: Path, serves: Callable[[str], None]) -> None:
    """No descriptor left, a checkpoint's disk that fails."""
    attachment = FakeAttachment(OSError(24, "Too many open files"))
    serves("second")
    keeping.keep(attachment, tmp_path)
    attachment.newest.end(Closing.OPEN)
    until(lambda: attachment.newest.session_id == 2)


def test_nothing_connects_before_another_daemon_serves(tmp_path: Path, serves: Callable[[str], None]) -> None:
    """After an orderly stop: neither where no daemon is, nor to the one that is going."""
    attachment = FakeAttachment()
    keeping.keep(attachment, tmp_path)
    serves("first")
    attachment.newest.end(Closing.DRAINING)
    time.sleep(0.1)
    serves("")
    time.sleep(0.1)
    assert attachment.tried == []
    serves("second")
    until(lambda: attachment.newest.session_id == 2)


def test_pauses_grow_and_each_trouble_is_said_once(
    tmp_path: Path, serves: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    absent, other = DaemonAbsentError("no daemon"), FingerprintError("another checkpoint")
    attachment = FakeAttachment(*[absent] * 6, *[other] * 6)
    serves("second")
    keeping.keep(attachment, tmp_path)
    with caplog.at_level("INFO", "vllm.syshax"):
        attachment.newest.end(Closing.OPEN)
        until(lambda: attachment.newest.session_id == 2)
    pauses = [later - earlier for earlier, later in zip(attachment.tried, attachment.tried[1:], strict=False)]
    assert max(pauses[:5]) < 0.1 and min(pauses[2:5]) >= keeping._LONGEST_S
    assert pauses[-1] >= keeping._LONGEST_AFTER_REFUSAL_S
    said = [record.getMessage() for record in caplog.records]
    assert sum("no daemon" in text for text in said) == 1 == sum("another checkpoint" in text for text in said)
    assert "session 2" in said[-1]


def test_the_computing_threads_own_return_is_enough(tmp_path: Path, serves: Callable[[str], None]) -> None:
    """A request found the loss first and opened the next session."""
    attachment = FakeAttachment()
    keeping.keep(attachment, tmp_path)
    lost, attachment.newest = attachment.newest, FakeModel(7)
    lost.end(Closing.OPEN)
    time.sleep(0.1)
    serves("second")
    attachment.newest.end(Closing.OPEN)
    until(lambda: attachment.newest.session_id == 8)
    assert len(attachment.tried) == 1


@pytest.mark.parametrize("away", [False, True])
def test_the_thread_ends_with_its_attachment(tmp_path: Path, serves: Callable[[str], None], away: bool) -> None:
    before = threads()
    attachment = FakeAttachment()
    keeping.keep(attachment, tmp_path)
    model = attachment.newest
    if away:
        model.end(Closing.OPEN)
        time.sleep(0.05)
    del attachment
    gc.collect()
    model.end(Closing.OPEN)
    until(lambda: threads() <= before)
