"""The supervisor with children that the test plays: none takes a connection, one cannot start, changes as one begins.

Real sockets and the real protocol between the two; only the processes are missing, so that each moment can be chosen.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from front_fixtures import until, write_keys

from syshax.errors import ConfigError, InternalError
from syshaxd.frontend import children, supervisor
from syshaxd.frontend.channel import Channel
from syshaxd.frontend.children import Child
from syshaxd.frontend.config import ApiConfig
from syshaxd.frontend.passing import _NUMBER, _REPLY, MOST_UNTAKEN, Giver, pair
from syshaxd.frontend.supervisor import Supervisor

FIRST, SECOND, THIRD = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"
CONFIG = ApiConfig.model_validate({"port": 0, "processes": 2, "workers": [FIRST, SECOND]})


class Played:
    """A child's side: what it was told and what it took. `does`: what it does before it answers to a name."""

    def __init__(self, **does: Callable[[], Awaitable[None]]) -> None:
        self.told: dict[str, Any] = {}
        self.taken = 0
        self.poor = False
        self.end = asyncio.Event()
        self._does = does

    async def start(self, keeper: Supervisor, row: int) -> Child:
        """Puts it into that row, as `Children.start` does."""
        ours, theirs = socket.socketpair()
        connections, self._connections = pair()
        self._channel = await Channel.open(theirs)
        self._serving = asyncio.create_task(self._channel.serve(self._answer))
        process: Any = SimpleNamespace(pid=1000 + row, kill=self.end.set, wait=self._ended)
        giver = Giver(connections, lambda connection: keeper._children._refused(child, connection))
        child = Child(row, process, await Channel.open(ours), giver)
        keeper._children.by_row[row] = child
        return child

    def take(self) -> None:
        """From now on it takes what it is given, or refuses that for lack of descriptors while it is `poor`."""
        asyncio.get_running_loop().add_reader(self._connections, self._take)

    async def _answer(self, name: str, **fields: Any) -> str:
        self.told.update(fields)
        if name == "drain":
            self.end.set()
        if (doing := self._does.pop(name, None)) is not None:
            await doing()
        return "ready: m"

    async def _ended(self) -> int:
        await self.end.wait()
        self._serving.cancel()
        asyncio.get_running_loop().remove_reader(self._connections)
        self._connections.close()
        return -9

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._connections, _NUMBER.size, 1)
                if not data:
                    break
                for descriptor in descriptors:
                    socket.close(descriptor)
                self.taken += not self.poor
                self._connections.send(_REPLY.pack(not self.poor, *_NUMBER.unpack(data)))


@asynccontextmanager
async def running(keeper: Supervisor, *plays: Played | OSError) -> AsyncIterator[asyncio.Task[int]]:
    """The supervisor runs; its starts have these ends, in this order."""
    left = list(plays)

    async def start(row: int) -> Child:
        play = left.pop(0)
        if isinstance(play, OSError):
            raise play
        return await play.start(keeper, row)

    keeper._children.start = start  # type: ignore[method-assign]
    run = asyncio.create_task(keeper.run())
    try:
        yield run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)


def connect(keeper: Supervisor, number: int) -> list[socket.socket]:
    made = [socket.socket() for _ in range(number)]
    for client in made:
        client.setblocking(False)
        client.connect_ex(keeper._listeners[0].getsockname())
    return made


async def refused_by_all(keeper: Supervisor, *plays: Played) -> list[socket.socket]:
    """One client, which waits since no child has a descriptor left."""
    await until(lambda: keeper._accepting)
    for play in plays:
        play.poor = True
        play.take()
    clients = connect(keeper, 1)
    await until(lambda: len(keeper._children.waiting) == 1)
    return clients


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(children, "_FULL_SECONDS", 0.1)


async def test_clients_are_served_after_no_child_had_a_descriptor_for_longer_than_a_pause() -> None:
    keeper, plays = Supervisor(CONFIG), [Played(), Played()]
    async with running(keeper, *plays):
        clients = await refused_by_all(keeper, *plays)
        clients += connect(keeper, 2)
        await until(lambda: len(keeper._children.waiting) > 1)
        await until(lambda: all(child.full_until for child in keeper._children.by_row.values()))
        for play in plays:
            play.poor = False
        await until(lambda: sum(play.taken for play in plays) == 3)
        clients += connect(keeper, 1)
        await until(lambda: sum(play.taken for play in plays) == 4)
        for client in clients:
            client.close()


async def test_one_refused_connection_is_served_though_no_other_comes() -> None:
    keeper, plays = Supervisor(CONFIG), [Played(), Played()]
    async with running(keeper, *plays):
        clients = await refused_by_all(keeper, *plays)
        plays[0].poor = False
        await until(lambda: plays[0].taken == 1)
        clients[0].close()


async def test_clients_are_served_after_all_children_were_busy_for_longer_than_a_pause() -> None:
    keeper, plays = Supervisor(CONFIG), [Played(), Played()]
    number = 2 * MOST_UNTAKEN + 30
    async with running(keeper, *plays):
        await until(lambda: keeper._accepting)
        clients = connect(keeper, number)
        await until(lambda: len(keeper._children.waiting) > 0)
        tries = 0
        give_waiting = keeper._children.give_waiting

        def counted() -> None:
            nonlocal tries
            tries += 1
            give_waiting()

        keeper._children.give_waiting = counted  # type: ignore[method-assign]
        await until(lambda: tries > 2)
        for play in plays:
            play.take()
        await until(lambda: sum(play.taken for play in plays) == number)
        for client in clients:
            client.close()


async def test_a_child_that_cannot_be_started_for_a_while_is_replaced_then(caplog: pytest.LogCaptureFixture) -> None:
    """Two starts fail, a third child does not begin, each with its reason in the log; the fourth takes connections."""

    async def fail() -> None:
        raise ConfigError("groups.a.key_file /k: there is no such file")

    keeper, plays = Supervisor(CONFIG), [Played(), Played(), Played(begin=fail), Played()]
    no_room = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    no_program = FileNotFoundError(errno.ENOENT, "No such file or directory")
    with caplog.at_level(logging.ERROR, "syshax.api"):
        async with running(keeper, *plays[:2], no_room, no_program, *plays[2:]):
            await until(lambda: keeper._accepting)
            plays[0].end.set()
            await until(lambda: len(keeper._children.by_row) == 2 and keeper._children.by_row[1].up and plays[3].told)
    for reason in ("Resource temporarily unavailable", "No such file or directory", "groups.a.key_file /k: there is"):
        assert sum(reason in record.getMessage() for record in caplog.records) == 1, caplog.text


async def test_a_service_whose_child_cannot_be_started_at_all_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_room(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    with pytest.raises(InternalError, match="cannot start a process: Resource temporarily unavailable"):
        async with asyncio.timeout(5):
            await Supervisor(CONFIG).run()


async def test_a_socket_handed_over_with_one_client_in_it_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a blocking one, and what waits there is taken as soon as the children are up."""
    keeper, plays = Supervisor(CONFIG), [Played(), Played()]
    handed = socket.create_server(("127.0.0.1", 0))
    blocking: list[bool] = []
    monkeypatch.setattr(supervisor, "take_handed", lambda: SimpleNamespace(sockets=[("", handed)]))
    monkeypatch.setattr(keeper, "_accept", lambda listener, most: blocking.append(listener.getblocking()))
    client = socket.create_connection(handed.getsockname())
    async with running(keeper, *plays):
        await until(lambda: bool(blocking))
        assert not any(blocking)
    client.close()
    handed.close()


async def test_what_changes_while_a_child_begins_reaches_it(tmp_path: Path) -> None:
    """A worker that is removed and a key that is revoked, as it is told of those before."""
    keys = write_keys(tmp_path / "keys.toml", {"old": {}, "revoked": {}})
    keeper = Supervisor(ApiConfig.model_validate({**CONFIG.model_dump(), "keys_file": str(keys)}))
    assert keeper._keys is not None

    async def add() -> None:
        await keeper._fleet.add(THIRD, None)

    async def remove_and_revoke() -> None:
        write_keys(keys, {"old": {}})
        await keeper._fleet.remove(SECOND)
        await keeper._reload()

    play = Played(begin=add, take_keys=remove_and_revoke)
    child = await play.start(keeper, 1)
    await child.begin(CONFIG, keeper._now, {})
    assert child.up and [row["url"] for row in play.told["wanted"]] == [FIRST, THIRD]
    assert play.told["rows"] == keeper._keys.rows() and len(play.told["rows"]) == 1
    await keeper._fleet.remove(THIRD)
    assert [row["url"] for row in play.told["wanted"]] == [FIRST]
    play.end.set()
    await keeper._children.ended(child)
