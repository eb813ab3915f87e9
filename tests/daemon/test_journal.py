"""Records in the journal: fields as the protocol wants them, large ones, a journal that is gone, and who gets them."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syshaxd.journal import JournalHandler, entry, field_name, is_connected
from syshaxd.logs import MessageFormatter, _facts


def parsed(data: bytes) -> dict[str, str]:
    """The protocol's reader, from its description."""
    found = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if equals:
            data = rest
        else:
            size = int.from_bytes(rest[:8], "little")
            value, data = rest[8 : 8 + size], rest[8 + size :]
            assert data[:1] == b"\n"
            data = data[1:]
        found[name.decode()] = value.decode(errors="surrogateescape")
    return found


@given(st.dictionaries(st.text("ABC_", min_size=1), st.text(st.characters(exclude_categories=["Cs"]))))
def test_any_text_survives(fields: dict[str, str]) -> None:
    assert parsed(entry(fields)) == fields


@given(st.text(min_size=1))
def test_field_names_are_what_the_journal_takes(fact: str) -> None:
    name = field_name(fact)
    assert len(name) <= 64 and set(name) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") and name[0] == "S"


@pytest.fixture
def journal(short_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(short_dir / "journal"))
        listener.settimeout(5)
        yield listener


class Caught(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log(short_dir: Path) -> Iterator[tuple[logging.Logger, Caught]]:
    """A logger into the test's journal, and what did not get there."""
    fallback, logger = Caught(), logging.Logger("syshaxd.registry")
    handler = JournalHandler("syshaxd", _facts, fallback, short_dir / "journal")
    handler.setFormatter(MessageFormatter())
    logger.addHandler(handler)
    yield logger, fallback
    handler.close()


def test_a_record_s_facts_are_fields(journal: socket.socket, log: tuple[logging.Logger, Caught]) -> None:
    log[0].warning("session %d\nends", 7, extra={"session": 7, "model": "qwen3", "request_id": "abc"})
    found = parsed(journal.recv(65536))
    assert found["MESSAGE"] == "session 7\\nends session=7 model=qwen3 request_id=abc" and found["PRIORITY"] == "4"
    assert (found["SYSHAX_SESSION"], found["SYSHAX_MODEL"], found["SYSHAX_REQUEST_ID"]) == ("7", "qwen3", "abc")
    assert found["SYSLOG_IDENTIFIER"] == "syshaxd" and found["SYSHAX_LOGGER"] == "syshaxd.registry"
    assert found["CODE_FILE"] == __file__ and found["CODE_FUNC"] == "test_a_record_s_facts_are_fields"


def test_a_traceback_is_part_of_the_message(journal: socket.socket, log: tuple[logging.Logger, Caught]) -> None:
    try:
        raise RuntimeError("oh")
    except RuntimeError:
        log[0].exception("it failed")
    found = parsed(journal.recv(65536))
    assert found["MESSAGE"].startswith("it failed\nTraceback") and found["MESSAGE"].endswith("RuntimeError: oh")
    assert found["PRIORITY"] == "3"


def test_what_is_too_large_for_a_datagram_comes_as_a_sealed_file(
    journal: socket.socket, log: tuple[logging.Logger, Caught]
) -> None:
    log[0].info("x" * (4 << 20), extra={"model": "m"})
    data, descriptors, _, _ = socket.recv_fds(journal, 16, 1)
    assert data == b"" and len(descriptors) == 1
    try:
        found = parsed(os.pread(descriptors[0], 8 << 20, 0))
        assert len(found["MESSAGE"]) == (4 << 20) + len(" model=m") and found["SYSHAX_MODEL"] == "m"
        with pytest.raises(PermissionError):
            os.pwrite(descriptors[0], b"y", 0)
    finally:
        os.close(descriptors[0])


def test_a_journal_that_is_gone_loses_no_record(log: tuple[logging.Logger, Caught]) -> None:
    log[0].info("hello")
    assert [record.getMessage() for record in log[1].records] == ["hello"]


def test_only_our_own_standard_error_counts(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        assert is_connected(f"{status.st_dev}:{status.st_ino}", stream.fileno())
        assert not is_connected(f"{status.st_dev}:{status.st_ino + 1}", stream.fileno())
        assert not is_connected(None, stream.fileno())
    assert not is_connected("1:2", 987654)


WRITE = """
import logging, os
from pathlib import Path
from syshaxd import journal, logs
from syshaxd.config import LoggingConfig
status = os.fstat(2)
journal.JournalHandler.__init__.__defaults__ = (Path(os.environ["TEST_JOURNAL"]),)
for variable in ("1:2", f"{status.st_dev}:{status.st_ino}"):
    os.environ["JOURNAL_STREAM"] = variable
    for format in ("text", "json"):
        logs.set_up_logging(LoggingConfig(format=format), "syshax-api")
        logging.getLogger("x").info("%s %s", variable == "1:2", format)
"""


def test_text_goes_to_the_journal_where_standard_error_does_and_json_never(journal: socket.socket) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE], capture_output=True, text=True, timeout=60,
        env=os.environ | {"TEST_JOURNAL": str(journal.getsockname())},
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and lines[0].endswith("info: True text"), done.stderr
    assert '"message": "True json"' in lines[1] and '"message": "False json"' in lines[2]
    found = parsed(journal.recv(65536))
    assert found["MESSAGE"] == "False text" and found["SYSLOG_IDENTIFIER"] == "syshax-api"
