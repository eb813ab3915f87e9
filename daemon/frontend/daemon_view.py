"""What syshaxd's view socket says of the workers' experts: one poll for all workers, and the verdict on each.

A worker's own answers cannot tell: vLLM is healthy while the experts that its requests wait for are away. Owns the
poll, and which session is whose. What follows from a verdict is decided in `workers`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError

from syshax.protocol import ErrorAnswer, SessionInfo, SessionsAnswer

log = logging.getLogger("syshax.api")
POLL_SECONDS = 0.5
ANSWER_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A daemon that takes connections and does not answer may be busy for so long before it counts as away."""
GRACE_SECONDS = 1.0
"""A daemon that restarts with its weights kept is back in this time; requests meanwhile wait in their worker."""
LOOK_UP_SECONDS = 30.0
"""Between two look-ups of a name, or of whether an address is this machine's, as long as no session has matched."""
_NAMES = 1024
"""So many are remembered: sessions name their hosts themselves."""
_EVERY_ADDRESS = frozenset(("0.0.0.0", "::", "*", ""))
Message = TypeVar("Message", bound=BaseModel)


class ViewError(Exception):
    """The daemon does not say it; the text says why. `slow`: it may yet."""

    def __init__(self, reason: str, slow: bool = False) -> None:
        super().__init__(reason)
        self.slow = slow


class DaemonView:
    """The daemon's sessions as of the last poll. `path`: of its view socket, "": nobody is asked."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sessions: list[SessionInfo] | None = None
        """None: the daemon does not answer."""
        self.trouble = "not asked yet" if path else ""
        """Why not."""
        self.names = Names()
        self._client: aiohttp.ClientSession | None = None

    @property
    def state(self) -> str:
        """For people."""
        return self.trouble or ("answers" if self.path else "not asked")

    async def watch(self, then: Callable[[], None]) -> None:
        """Polls for ever; calls `then` after each."""
        answered = 0.0
        while self.path:
            try:
                answer = await self.get("/v1/sessions", SessionsAnswer)
            except ViewError as error:
                if error.slow and self.sessions is not None and time.monotonic() - answered < SILENT_SECONDS:
                    continue  # at once: it took its time already
                if self.sessions is not None:
                    log.warning("syshaxd cannot be seen any more: %s", error)
                self.sessions, self.trouble = None, str(error)
            else:
                if self.sessions is None:
                    log.info("syshaxd is seen at %s: %d sessions", self.path, len(answer.sessions))
                self.sessions, self.trouble, answered = answer.sessions, "", time.monotonic()
                self.names.look_up({_place(session.address)[0] for session in answer.sessions})
            then()
            await asyncio.sleep(POLL_SECONDS)

    async def get(self, path: str, message: type[Message]) -> Message:
        """One answer of the daemon's. Raises ViewError."""
        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.path))
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._client.get(f"http://syshaxd{path}") as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise ViewError(ErrorAnswer.model_validate_json(body).error.message)
                return message.model_validate_json(body)
        except TimeoutError:
            raise ViewError(f"no answer in {ANSWER_SECONDS:g} s", slow=True) from None
        except ValidationError:
            raise ViewError("it answers something else than expected") from None
        except OSError as error:
            raise ViewError(os.strerror(error.errno).lower() if error.errno else "no connection") from None
        except aiohttp.ClientError:
            raise ViewError("its answer broke off") from None

    async def close(self) -> None:
        await self.names.close()
        if self._client is not None:
            await self._client.close()


class Experts:
    """One worker's experts: `state` for people, `reason` why it must not get requests, "" when it may."""

    def __init__(self, url: str) -> None:
        self.state = "not known"
        """Or attached, or missing."""
        self.reason = ""
        self._place = _place(url)
        self._known = False
        self._good_at = 0.0

    def look(self, view: DaemonView) -> None:
        """Judges by what the view holds now."""
        view.names.look_up({self._place[0]}, again=not self._known)
        mine = [session for session in view.sessions or () if self._is_mine(view.names, session)]
        self._known = self._known or bool(mine)
        if not self._known:
            return
        if view.sessions is None:
            missing = f"its experts are not attached: syshaxd cannot be asked ({view.trouble})"
        elif not mine:
            missing = "its experts are not attached: syshaxd has no session of it"
        elif stale := next((session for session in mine if session.stale), None):
            missing = f"its experts are not attached: the process of session {stale.session_id} is stopped"
        else:
            self.state, self.reason, self._good_at = "attached", "", time.monotonic()
            return
        self.state = "missing"
        if self.away_seconds() >= GRACE_SECONDS:
            self.reason = missing

    def away_seconds(self) -> float:
        """Since they were last seen attached."""
        return time.monotonic() - self._good_at

    def _is_mine(self, names: Names, session: SessionInfo) -> bool:
        host, port = self._place
        other, other_port = _place(session.address)
        if not other_port or port != other_port:
            return False
        if host == other:
            return True
        if port == UNIX:
            return False
        here = names.addresses(host) & names.local
        return bool(here) and (other in _EVERY_ADDRESS or bool(here & names.addresses(other)))


UNIX = -1


def _place(url: str) -> tuple[str, int]:
    """Host and port, or the path of a Unix socket and UNIX; ("", 0) for what is neither."""
    if url.startswith("unix:"):
        return os.path.normpath(url.removeprefix("unix:")), UNIX
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            return "", 0
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0


@dataclass(eq=False)
class _Name:
    addresses: frozenset[str] = frozenset()
    tried: float = -LOOK_UP_SECONDS
    task: asyncio.Task[None] | None = None


class Names:
    """Addresses of host names, and which of them are this machine's: those that a socket can be bound to.

    They become known in the background: nobody here waits for a name server.
    """

    def __init__(self) -> None:
        self.local: set[str] = set()
        self._names: dict[str, _Name] = {}
        """The one that was asked for the longest ago comes first."""
        self._alone = asyncio.Lock()
        """One look-up at a time: libuv has two threads for them, and connections to workers need one."""

    def addresses(self, host: str) -> frozenset[str]:
        """As far as they are known now."""
        return self._names[host].addresses if host in self._names else frozenset()

    def look_up(self, hosts: Iterable[str], again: bool = False) -> None:
        """Makes them known soon; `again`: also those that are, from time to time."""
        now = time.monotonic()
        for host in hosts:
            if not host or host.startswith("/") or host in _EVERY_ADDRESS:
                continue
            name = self._names[host] = self._names.pop(host) if host in self._names else _Name()
            if name.task is not None or (name.addresses and not again) or now - name.tried < LOOK_UP_SECONDS:
                continue
            name.tried = now
            try:  # an address needs no name server
                found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
            except (OSError, ValueError):
                name.task = asyncio.create_task(self._ask_for(host, name))
            else:
                self._learn(name, found)
        while len(self._names) > _NAMES:
            forgotten = self._names.pop(next(iter(self._names)))
            if forgotten.task is not None:
                forgotten.task.cancel()

    async def _ask_for(self, host: str, name: _Name) -> None:
        try:
            async with self._alone:
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except (OSError, ValueError):
            return
        finally:
            name.task = None
        self._learn(name, found)

    def _learn(self, name: _Name, found: Iterable[tuple[int, int, int, str, tuple[Any, ...]]]) -> None:
        name.addresses = frozenset(str(address[0]) for *_, address in found)
        self.local |= {str(address[0]) for family, *_, address in found if _is_local(family, address)}

    async def close(self) -> None:
        """Ends the look-ups under way."""
        tasks = [name.task for name in self._names.values() if name.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_local(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
