"""The attach socket: leases, limits, hostile messages, memory that must be there."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon, eventually
from fake_core import CLOSING_OFFSET, CoreError
from hypothesis import given, settings
from hypothesis import strategies as st

from syshax.errors import InvalidArgumentError, NoMemoryError, SyshaxError, VersionError
from syshax.protocol import Closing
from syshaxd import attach
from syshaxd.attach import parse_request, reserve_shared_memory

REQUEST = {"model": "tiny", "client": "test", "max_tokens": 16}


async def gone(daemon: Daemon) -> None:
    await eventually(lambda: len(daemon.server.parts.sessions) == 0, "the sessions' end")


async def test_a_session_gets_memory_and_doorbell_and_lives_as_long_as_its_connection(daemon: Daemon) -> None:
    connection, answer, descriptors = await daemon.attach({**REQUEST, "dtype": "bfloat16", "num_slots": 3, "top_k": 4})
    assert answer["boot_id"] == (await daemon.json("GET", "/v1/status"))[1]["boot_id"]
    assert answer["layout"] == answer["layout"] | {"num_slots": 3, "max_tokens": 16, "element_bytes": 2, "top_k": 4}
    assert answer["geometry"]["layer_ids"] == [0, 1] and answer["format"] == "bf16"
    memory, doorbell = descriptors
    assert os.fstat(memory).st_size == answer["layout"]["total_bytes"]
    assert os.fstat(memory).st_nlink == 0, "the shared memory has no name"
    assert os.fstat(memory).st_mode & 0o777 == 0o600
    assert os.fstat(memory).st_blocks * 512 >= answer["layout"]["total_bytes"], "its pages are there"
    with mmap.mmap(memory, answer["layout"]["total_bytes"]) as ring:
        assert ring[8:24].hex() == answer["boot_id"]
    os.eventfd_write(doorbell, 1)
    (info,) = (await daemon.json("GET", "/v1/sessions"))[1]["sessions"]
    assert (info["model"], info["client"], info["pid"], info["uid"]) == ("tiny", "test", os.getpid(), os.getuid())
    assert (await daemon.json("GET", "/v1/models/tiny"))[1]["sessions"] == 1
    connection.close()
    await gone(daemon)
    assert not daemon.core.runtime.sessions
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model": "tinny"}, "unknown_model", "did you mean tiny"),
        ({"model": "../x"}, "invalid_argument", "model"),
        ({"max_tokens": 0}, "invalid_argument", "max_tokens"),
        ({"max_tokens": "many"}, "invalid_argument", "max_tokens"),
        ({"max_tokens": 100_000}, "limit", "limits.tokens_per_session"),
        ({"num_slots": 20}, "limit", "limits.slots"),
        ({"top_k": 5}, "invalid_argument", "4 experts"),
        ({"top_k": 0}, "invalid_argument", "top_k"),
        ({"dtype": "float64"}, "invalid_argument", "dtype"),
        ({"fingerprint": "00"}, "fingerprint", "not the one loaded"),
        ({"protocol": 2}, "version", "protocol 2"),
        ({"protocol": "\ud800"}, "version", "protocol"),
        ({"client": "\ud800"}, "invalid_argument", "client"),
        ({"client": "x" * 300}, "invalid_argument", "client"),
        ({"cpus": ["a"]}, "invalid_argument", "cpus"),
        ({"priority": "urgent"}, "invalid_argument", "priority"),
        ({"surprise": 1}, "invalid_argument", "surprise"),
    ],
)
async def test_wrong_requests_are_refused_in_words(
    daemon: Daemon, changes: dict[str, Any], code: str, words: str
) -> None:
    connection, answer, descriptors = await daemon.attach({**REQUEST, **changes})
    assert answer["error"]["code"] == code and not descriptors
    assert words in answer["error"]["message"] + answer["error"]["hint"]
    assert connection.recv(10) == b"", "the daemon ends the connection"
    connection.close()
    await gone(daemon)


@pytest.mark.parametrize("data", [b"{", b"null", b"[]", b"\xff\xfe", b"[" * 16000, b'{"model":1e999}', b" " * 16385])
async def test_hostile_datagrams(daemon: Daemon, data: bytes) -> None:
    connection, answer, _ = await daemon.attach(data)
    assert answer["error"]["code"] == "invalid_argument"
    connection.close()


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=300)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_no_datagram_gives_anything_but_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_request(data)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*REQUEST, "top_k", "dtype", "num_slots", "cpus", "protocol", "priority", "fingerprint", "x"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=3),
    )
)
def test_mutated_requests_parse_or_fail_with_an_error_of_ours(fields: dict[str, Any]) -> None:
    try:
        request = parse_request(json.dumps({**REQUEST, **fields}).encode())
    except (InvalidArgumentError, VersionError) as error:
        assert attach.refusal(error)
    else:
        assert 1 <= request.max_tokens <= 1 << 20 and 1 <= request.num_slots <= 64


async def test_silent_and_vanishing_clients_cost_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syshaxd.sessions.REQUEST_SECONDS", 0.2)
    silent = daemon.dial()
    daemon.dial().close()
    answer = await asyncio.to_thread(silent.recv, 1000)
    assert b"no attach request came" in answer
    silent.close()
    connection, _, descriptors = await daemon.attach(REQUEST)
    assert len(descriptors) == 2
    connection.close()


async def test_more_silent_clients_than_may_wait_do_not_lock_others_out(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syshaxd.sessions.REQUEST_SECONDS", 0.2)
    silent = [daemon.dial() for _ in range(100)]
    connection, answer, _ = await daemon.attach(REQUEST)
    assert "session_id" in answer
    for client in [*silent, connection]:
        client.close()


async def test_a_second_message_ends_the_session(daemon: Daemon) -> None:
    connection, _, _ = await daemon.attach(REQUEST)
    connection.send(b"again")
    assert b"one attach request" in await asyncio.to_thread(connection.recv, 1000)
    assert await asyncio.to_thread(connection.recv, 1000) == b""
    await gone(daemon)


async def test_limits_on_sessions_and_their_memory(daemon: Daemon) -> None:
    await daemon.json("PATCH", "/v1/config", {"values": {"limits.sessions": 1}})
    first, _, _ = await daemon.attach(REQUEST)
    second, answer, _ = await daemon.attach(REQUEST)
    assert answer["error"]["code"] == "limit" and "limits.sessions" in answer["error"]["message"]
    first.close()
    await gone(daemon)
    values = {"limits.sessions": None, "limits.shared_memory_per_session": "16KiB"}
    assert (await daemon.json("PATCH", "/v1/config", {"values": values}))[0] == 200
    third, answer, _ = await daemon.attach(REQUEST)
    assert "shared_memory_per_session allows 16 KiB" in answer["error"]["message"]
    second.close()
    third.close()


async def test_a_core_that_refuses_a_session_leaves_nothing(daemon: Daemon) -> None:
    daemon.core.add_error = CoreError("no_memory", "no mapping", "ulimit")
    connection, answer, _ = await daemon.attach(REQUEST)
    assert answer["error"] == {"code": "no_memory", "message": "no mapping", "hint": "ulimit"}
    connection.close()
    daemon.core.add_error = RuntimeError("oops")
    connection, answer, _ = await daemon.attach(REQUEST)
    assert answer["error"]["code"] == "internal" and "oops" not in json.dumps(answer)
    connection.close()
    await gone(daemon)
    assert not daemon.core.runtime.sessions


async def test_no_more_open_files_is_said_and_others_are_served_on(daemon: Daemon, monkeypatch: Any) -> None:
    def none_left(*arguments: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", none_left)
    connection, answer, _ = await daemon.attach(REQUEST)
    assert answer["error"]["code"] == "limit" and "Too many open files" in answer["error"]["message"]
    connection.close()
    monkeypatch.undo()
    connection, answer, _ = await daemon.attach(REQUEST)
    assert "session_id" in answer
    connection.close()


async def test_truncated_memory_and_stopped_processes_end_a_session(daemon: Daemon, monkeypatch: Any) -> None:
    connection, answer, _ = await daemon.attach(REQUEST)
    daemon.core.poisoned.add(answer["session_id"])
    await daemon.server.parts.sessions.look_after()
    last = json.loads(await asyncio.to_thread(connection.recv, 4096))["error"]
    assert last["code"] == "session_ended" and "its memory was cut short" in last["message"]
    assert await asyncio.to_thread(connection.recv, 10) == b""
    await gone(daemon)
    stopped, answer, _ = await daemon.attach(REQUEST)
    sessions = daemon.server.parts.sessions
    monkeypatch.setattr("syshaxd.sessions.process_is_stopped", lambda pid: pid == os.getpid())
    await sessions.look_after()
    assert not (await daemon.json("GET", "/v1/sessions"))[1]["sessions"][0]["stale"], "its heartbeat was just seen"
    await sessions.look_after()
    assert (await daemon.json("GET", "/v1/sessions"))[1]["sessions"][0]["stale"]
    sessions.get(answer["session_id"]).alive_at -= 61
    ring = daemon.core.runtime.sessions[answer["session_id"]][1]
    await sessions.look_after()
    assert ring[CLOSING_OFFSET] == Closing.STOPPED
    last = json.loads(await asyncio.to_thread(stopped.recv, 4096))["error"]
    assert last["code"] == "daemon_lost" and "stopped for more than 60 s" in last["message"]
    assert await asyncio.to_thread(stopped.recv, 10) == b""
    await gone(daemon)


def test_memory_that_is_not_there_is_an_error_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(NoMemoryError, match=r"needs 1024 TiB of memory, .* are available"):
        reserve_shared_memory(1 << 50)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoMemoryError, match=r"64 KiB of shared memory, /dev/shm has .* free"):
        reserve_shared_memory(65536)
    assert set(Path("/dev/shm").iterdir()) == before


def test_refusals_fit_into_a_datagram() -> None:
    assert len(attach.refusal(SyshaxError("x" * 100_000, "\n" * 100_000))) < 16384


async def test_the_socket_is_not_there_for_the_wrong_kind(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream, pytest.raises(OSError):
        stream.connect(str(daemon.runtime_dir / "attach.sock"))
    assert Path(daemon.runtime_dir / "attach.sock").stat().st_mode & 0o777 == 0o600
