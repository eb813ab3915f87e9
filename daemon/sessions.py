"""Attached clients: the attach socket, the sessions' shared memory, and leases.

Owns everything between a connection on the attach socket and the data plane's serving of its ring. A session is one
connection, served by one coroutine from accept to the end of the lease: receive the request, check it, make the memory,
hand over descriptors, then wait for the connection to end. To end a session from here is to shut its connection
down; the coroutine then does what it does when the client goes. What the ring holds is the core's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from syshax.errors import (
    FingerprintError,
    InternalError,
    InvalidArgumentError,
    LimitError,
    ShuttingDownError,
    SyshaxError,
    UnknownSessionError,
)
from syshax.protocol import (
    ATTACH_MESSAGE_BYTES,
    AttachAnswer,
    AttachRequest,
    RingLayout,
    SessionInfo,
)
from syshaxd.attach import parse_request, refusal, reserve_shared_memory
from syshaxd.config import Config
from syshaxd.core import Core, CoreModel, CoreRuntime, core_errors
from syshaxd.machine import process_is_stopped
from syshaxd.peers import Peer, peer_of
from syshaxd.planner import Plan, client_spin_us
from syshaxd.quantities import human_size
from syshaxd.registry import Entry, Registry

log = logging.getLogger(__name__)
REQUEST_SECONDS = 5.0
"""How long a connection may take to say what it wants."""
WAITING_CONNECTIONS = 64
"""Connections that have not said it yet; more wait in the kernel's queue."""


@dataclass
class Totals:
    """What ended sessions of one model did, so that counters never go back."""

    requests: int = 0
    tokens: int = 0
    errors: int = 0
    queued_ns: int = 0
    compute_ns: int = 0

    def add(self, stats: dict[str, Any]) -> None:
        for name in ("requests", "tokens", "errors", "queued_ns", "compute_ns"):
            setattr(self, name, getattr(self, name) + int(stats.get(name, 0)))


@dataclass(eq=False)
class Session:
    """One attached client."""

    session_id: int
    entry: Entry
    model: CoreModel
    request: AttachRequest
    peer: Peer
    connection: socket.socket
    layout: dict[str, int]
    attached_at: float = field(default_factory=time.monotonic)
    end_reason: str = ""
    heartbeat: int = -1
    heartbeat_since: float = field(default_factory=time.monotonic)
    stale: bool = False

    @property
    def shm_bytes(self) -> int:
        return self.layout["total_bytes"]

    def end(self, reason: str) -> None:
        """Shuts the connection down: the client sees that its lease is over, the session's coroutine cleans up."""
        self.end_reason = self.end_reason or reason
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Sessions:
    """All sessions of the daemon."""

    def __init__(
        self,
        core: Core,
        runtime: CoreRuntime,
        plan: Plan,
        registry: Registry,
        config: Callable[[], Config],
        boot_id: bytes,
    ) -> None:
        self._core, self._runtime, self._plan, self._registry = core, runtime, plan, registry
        self._config, self._boot_id = config, boot_id
        self._sessions: dict[int, Session] = {}
        self._next_id = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: set[socket.socket] = set()
        self._waiting = asyncio.Semaphore(WAITING_CONNECTIONS)
        self._closing = False
        self.ended: dict[str, Totals] = {}
        registry.end_sessions = self.end_of_model

    # ---------------------------------------------------------------- accepting

    async def serve(self, listener: socket.socket) -> None:
        """Accepts until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._waiting.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._waiting.release()
                log.error("a client could not be accepted: %s", error.strerror)
                await asyncio.sleep(0.2)
                continue
            except BaseException:
                self._waiting.release()
                raise
            task = loop.create_task(self._connection(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connection(self, connection: socket.socket) -> None:
        with connection:
            session = None
            self._pending.add(connection)
            try:
                try:
                    connection.setblocking(False)
                    peer = peer_of(connection)
                    request = await self._receive(connection)
                finally:
                    self._pending.discard(connection)
                    self._waiting.release()
                if request is not None:
                    session = self._admit(request, peer, connection)
                    await self._attach(session)
            except SyshaxError as error:
                log.info("attach refused: %s", error, extra={"peer": str(peer_of(connection))})
                self._refuse(connection, error)
            except OSError as error:
                log.warning("an attach failed: %s", error)
                self._refuse(connection, LimitError(f"the daemon has no room for the session: {error.strerror}"))
            except Exception:
                log.exception("an attach failed")
                self._refuse(connection, InternalError("the attach failed inside the daemon; its log has the details"))
            else:
                if session is not None:
                    await self._lease(session)
            finally:
                if session is not None:
                    await self._remove(session)

    async def _receive(self, connection: socket.socket) -> AttachRequest | None:
        """The request; None when the client left without one."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                data = await loop.sock_recv(connection, ATTACH_MESSAGE_BYTES + 1)
        except TimeoutError:
            raise InvalidArgumentError(f"no attach request came within {REQUEST_SECONDS:g} s") from None
        except OSError:
            return None
        return parse_request(data) if data else None

    def _refuse(self, connection: socket.socket, error: SyshaxError) -> None:
        with suppress(OSError):
            connection.send(refusal(error))

    # ---------------------------------------------------------------- attaching

    def _admit(self, request: AttachRequest, peer: Peer, connection: socket.socket) -> Session:
        """Checks the request against model and limits and enters the session, so that the model stays."""
        if self._closing:
            raise ShuttingDownError("the daemon is stopping", "attach again when it is back")
        entry = self._registry.ready(request.model)
        assert entry.model is not None and entry.facts is not None
        if request.fingerprint is not None and request.fingerprint != entry.facts.fingerprint:
            raise FingerprintError(
                f"the client's checkpoint of {request.model} is not the one loaded here from {entry.path}",
                f"fingerprints: client {request.fingerprint[:16]}, daemon {entry.facts.fingerprint[:16]}",
            )
        layout = self._layout(request, entry, entry.model)
        self._check_limits(request, layout["total_bytes"])
        session = Session(self._next_id, entry, entry.model, request, peer, connection, layout)
        self._next_id += 1
        self._sessions[session.session_id] = session
        entry.sessions.add(session.session_id)
        return session

    def _layout(self, request: AttachRequest, entry: Entry, model: CoreModel) -> dict[str, int]:
        assert entry.facts is not None
        geometry = entry.facts.geometry
        top_k = request.top_k or geometry.top_k
        if top_k > geometry.num_experts:
            raise InvalidArgumentError(f"top_k is {top_k}, but {request.model} has {geometry.num_experts} experts")
        with core_errors(self._core):
            return self._runtime.session_layout(
                model, request.max_tokens, top_k, request.dtype.bytes, request.num_slots
            )

    def _check_limits(self, request: AttachRequest, shm_bytes: int) -> None:
        limits = self._config().limits
        held = sum(session.shm_bytes for session in self._sessions.values())
        rows: list[tuple[str, int, int, str]] = [
            ("max_tokens", request.max_tokens, limits.tokens_per_session, "tokens_per_session"),
            ("num_slots", request.num_slots, limits.slots, "slots"),
            ("the session's memory", shm_bytes, limits.shared_memory_per_session, "shared_memory_per_session"),
            ("all sessions' memory", held + shm_bytes, limits.shared_memory_total, "shared_memory_total"),
            ("the number of sessions", len(self._sessions) + 1, limits.sessions, "sessions"),
        ]
        for what, wanted, allowed, key in rows:
            if wanted > allowed:
                text = human_size if "memory" in key else str
                raise LimitError(
                    f"{what} would be {text(wanted)}, limits.{key} allows {text(allowed)}",
                    f"ask for less, or raise it: syshaxctl config set limits.{key} ...",
                )

    async def _attach(self, session: Session) -> None:
        """Makes the memory, has the data plane serve it, and hands it over."""
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        memory = -1
        try:
            memory = await asyncio.to_thread(reserve_shared_memory, session.shm_bytes)
            await asyncio.to_thread(self._add, session, memory, doorbell)
            answer = self._answer(session).model_dump_json().encode()
            with suppress(OSError):  # the client left meanwhile: the lease ends at once
                socket.send_fds(session.connection, [answer], [memory, doorbell])
        finally:
            os.close(doorbell)
            if memory >= 0:
                os.close(memory)
        log.info(
            "session %d attached to %s", session.session_id, session.entry.name,
            extra={
                "session": session.session_id, "model": session.entry.name, "client": repr(session.request.client),
                "peer": str(session.peer), "shm_bytes": session.shm_bytes,
            },
        )  # fmt: skip

    def _add(self, session: Session, memory: int, doorbell: int) -> None:
        request = session.request
        with core_errors(self._core):
            self._runtime.add_session(
                session.session_id,
                session.model,
                memory,
                doorbell,
                self._boot_id,
                request.max_tokens,
                session.layout["top_k"],
                request.dtype.bytes,
                request.num_slots,
                client_spin_us(self._plan, frozenset(request.cpus)),
            )

    def _answer(self, session: Session) -> AttachAnswer:
        entry = session.entry
        assert entry.facts is not None
        return AttachAnswer(
            boot_id=self._boot_id.hex(),
            session_id=session.session_id,
            model=entry.name,
            format=entry.format,
            fingerprint=entry.facts.fingerprint,
            geometry=entry.facts.geometry,
            layout=RingLayout.model_validate(session.layout),
        )

    # ------------------------------------------------------------- lease and end

    async def _lease(self, session: Session) -> None:
        """Returns when the connection ends. The client has nothing more to say: a further message ends it too."""
        try:
            more = await asyncio.get_running_loop().sock_recv(session.connection, 1)
        except OSError:
            more = b""
        if more and not session.end_reason:
            session.end_reason = "the client sent a second message"
            self._refuse(session.connection, InvalidArgumentError("a session takes one attach request, no more"))

    async def _remove(self, session: Session) -> None:
        stats = self.core_stats().get(session.session_id, {})
        try:
            await asyncio.to_thread(self._runtime.remove_session, session.session_id)
        finally:
            self.ended.setdefault(session.entry.name, Totals()).add(stats)
            del self._sessions[session.session_id]
            session.entry.sessions.discard(session.session_id)
            log.info(
                "session %d ended: %s", session.session_id, session.end_reason or "the client left",
                extra={
                    "session": session.session_id, "model": session.entry.name, "requests": stats.get("requests", 0)
                },
            )  # fmt: skip

    def end(self, session_id: int, reason: str) -> Session:
        session = self.get(session_id)
        session.end(reason)
        return session

    def end_of_model(self, entry: Entry, reason: str) -> None:
        for session_id in list(entry.sessions):
            self._sessions[session_id].end(reason)

    async def close(self, reason: str) -> None:
        """Ends all sessions and waits until nothing touches their memory."""
        self._closing = True
        for session in list(self._sessions.values()):
            session.end(reason)
        for connection in self._pending:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        waiting = [task for task in self._tasks if not task.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=REQUEST_SECONDS)

    def refuse_new(self) -> None:
        self._closing = True

    # ------------------------------------------------------------------ looking

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, session_id: int) -> Session:
        if session_id not in self._sessions:
            raise UnknownSessionError(f"there is no session {session_id}", "`syshaxctl sessions` lists them")
        return self._sessions[session_id]

    def core_stats(self) -> dict[int, dict[str, Any]]:
        return {int(stats["session_id"]): stats for stats in self._runtime.session_stats()}

    def infos(self) -> list[SessionInfo]:
        stats = self.core_stats()
        return [_info(session, stats.get(session.session_id, {})) for session in self]

    def totals(self) -> dict[str, Totals]:
        """For each model, over ended and living sessions."""
        sums = {name: Totals(**vars(totals)) for name, totals in self.ended.items()}
        stats = self.core_stats()
        for session in self:
            sums.setdefault(session.entry.name, Totals()).add(stats.get(session.session_id, {}))
        return sums

    def look_after(self) -> None:
        """Called every few seconds: ends sessions whose memory was cut short or whose process stands still."""
        limit, now, stats = self._config().limits.stopped_seconds, time.monotonic(), self.core_stats()
        for session in self:
            seen = stats.get(session.session_id, {})
            if seen.get("poisoned"):
                session.end(str(seen["ended"]) or "the data plane serves it no more")
            if seen.get("heartbeat", session.heartbeat) != session.heartbeat:
                session.heartbeat, session.heartbeat_since = int(seen["heartbeat"]), now
            session.stale = process_is_stopped(session.peer.pid)
            if session.stale and limit and now - session.heartbeat_since > limit:
                session.end(f"its process (pid {session.peer.pid}) has been stopped for more than {limit} s")


def _info(session: Session, stats: dict[str, Any]) -> SessionInfo:
    request = session.request
    return SessionInfo(
        session_id=session.session_id,
        model=session.entry.name,
        client=request.client,
        pid=session.peer.pid,
        uid=session.peer.uid,
        priority=request.priority,
        attached_seconds=time.monotonic() - session.attached_at,
        max_tokens=request.max_tokens,
        num_slots=request.num_slots,
        shm_bytes=session.shm_bytes,
        requests=stats.get("requests", 0),
        tokens=stats.get("tokens", 0),
        errors=stats.get("errors", 0),
        in_flight=stats.get("in_flight", 0),
        queued_ms_total=stats.get("queued_ns", 0) / 1e6,
        compute_ms_total=stats.get("compute_ns", 0) / 1e6,
        client_wait_ms_total=stats.get("client_wait_ns", 0) / 1e6,
        last_active_seconds=stats.get("last_active_ns_ago", 0) / 1e9,
        stale=session.stale,
    )
