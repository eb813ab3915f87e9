"""Attached clients: the attach socket, the sessions' shared memory, and leases.

Owns everything between a connection on the attach socket and the data plane's serving of its ring. A session is one
connection, served by one coroutine from accept to the end of the lease: receive the request, check it, make the memory,
hand over descriptors, then wait for the connection to end. To end a session from here is to have the core write why
into its ring and to shut its connection down; the coroutine then does what it does when the client goes. What the ring
holds is the core's business, limits are admission.py's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from syshax.endings import ending
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
    Closing,
    Priority,
    RingLayout,
    SessionChange,
    SessionInfo,
)
from syshaxd.admission import check_limits
from syshaxd.attach import parse_request, refusal, reserve_shared_memory
from syshaxd.config import Config
from syshaxd.core import Core, CoreModel, CoreRuntime, core_errors
from syshaxd.machine import process_is_stopped
from syshaxd.peers import Peer, peer_of
from syshaxd.planner import Plan, client_spin_us
from syshaxd.registry import Entry, Registry
from syshaxd.session import Session
from syshaxd.session_totals import Ledger, Totals
from syshaxd.waiting import Waiting

log = logging.getLogger(__name__)
REQUEST_SECONDS = 5.0
"""How long a connection may take to say what it wants."""
CORE_SECONDS = 2.0
"""How long the end of a session waits for the data plane, which may stand still, to write why."""


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
        self._waiting = Waiting()
        self._changing = asyncio.Lock()
        self._closing = False
        self._ledger = Ledger()
        registry.end_sessions = self.end_of_model

    # ---------------------------------------------------------------- accepting

    async def serve(self, listener: socket.socket) -> None:
        """Accepts until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.error("a client could not be accepted: %s", error.strerror)
                await asyncio.sleep(0.2)
                continue
            task = loop.create_task(self._connection(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # the new one is read before the next is accepted, however many wait

    async def _connection(self, connection: socket.socket) -> None:
        with connection:
            session = None
            try:
                try:
                    connection.setblocking(False)
                    peer = peer_of(connection)
                    self._waiting.enter(connection, peer.uid)
                    request = await self._receive(connection)
                finally:
                    self._waiting.leave(connection)
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
        check_limits(request, layout["total_bytes"], peer, self, self._config())
        session = Session(self._next_id, entry, entry.model, request, peer, connection, layout, request.priority)
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

    async def _attach(self, session: Session) -> None:
        """Makes the memory, has the data plane serve it, and hands it over."""
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        memory = -1
        try:
            memory = await asyncio.to_thread(reserve_shared_memory, session.shm_bytes)
            async with self._changing:  # a change that comes meanwhile comes after it
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
                session.priority.code,
                self.share(session),
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
            self._ledger.close(session, stats)
            del self._sessions[session.session_id]
            session.entry.sessions.discard(session.session_id)
            log.info(
                "session %d ended: %s", session.session_id, session.end_reason or "the client left",
                extra={
                    "session": session.session_id, "model": session.entry.name, "requests": stats.get("requests", 0)
                },
            )  # fmt: skip

    async def end(self, session: Session, closing: Closing, reason: str) -> None:
        """Its client may hear why, the data plane serves it no more and its ring says so, then the lease ends.

        In this order: whoever sees the end in the ring finds the words."""
        session.say(ending(closing, reason))
        with suppress(TimeoutError):
            async with asyncio.timeout(CORE_SECONDS):
                await asyncio.to_thread(self._runtime.end_session, session.session_id, closing.value)
        session.hang_up(reason)

    def end_of_model(self, entry: Entry, reason: str) -> None:
        for session_id in list(entry.sessions):
            self._sessions[session_id].hang_up(reason)

    async def close(self, reason: str) -> None:
        """Ends all sessions and waits until nothing touches their memory."""
        self._closing = True
        for session in list(self._sessions.values()):
            session.hang_up(reason)
        self._waiting.end_all()
        waiting = [task for task in self._tasks if not task.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=REQUEST_SECONDS)

    def refuse_new(self) -> None:
        self._closing = True

    # ------------------------------------------------------------------ classes

    def share(self, session: Session) -> int:
        """Percent of the data plane's time that it may take."""
        return session.own_share or self._config().scheduling.share

    async def apply_configuration(self) -> None:
        """The classes' weights and every session's share as they are configured now."""
        async with self._changing:
            await asyncio.to_thread(self._runtime.set_class_weights, self._config().scheduling.weights())
            for session in self:
                await self._configure(session)

    def only_lowers(self, session: Session, change: SessionChange) -> bool:
        return (change.priority or session.priority).code >= session.priority.code and (
            change.share is None or change.share <= self.share(session)
        )

    async def change(self, session: Session, change: SessionChange) -> SessionInfo:
        """Another class or share, for as long as the session lasts."""
        async with self._changing:
            if change.priority is not None and change.priority is not session.priority:
                self._ledger.reclass(session, self.core_stats().get(session.session_id, {}))
                session.priority = change.priority
            if change.share is not None:
                session.own_share = change.share
            await self._configure(session)
        log.info(
            "session %d is %s now, share %d %%", session.session_id, session.priority.value, self.share(session),
            extra={"session": session.session_id},
        )  # fmt: skip
        return self._info(session, self.core_stats().get(session.session_id, {}))

    async def _configure(self, session: Session) -> None:
        await asyncio.to_thread(
            self._runtime.configure_session, session.session_id, session.priority.code, self.share(session)
        )

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
        return [self._info(session, stats.get(session.session_id, {})) for session in self]

    def by_model(self) -> dict[str, Totals]:
        """What ended and living sessions did."""
        return self._ledger.by_model(self, self.core_stats())

    def by_class(self) -> dict[Priority, Totals]:
        return self._ledger.by_class(self, self.core_stats())

    async def look_after(self) -> None:
        """Called every few seconds: ends sessions whose client broke the ring or whose process stands still."""
        limit, now, stats = self._config().limits.stopped_seconds, time.monotonic(), self.core_stats()
        self._ledger.sample(stats)
        for session in self:
            seen = stats.get(session.session_id, {})
            if seen.get("poisoned"):
                reason = str(seen["ended"]) or "the data plane serves it no more"
                session.say(ending(Closing.BROKEN_QUEUE, reason))
                session.hang_up(reason)
            if seen.get("heartbeat", session.heartbeat) != session.heartbeat or not process_is_stopped(
                session.peer.pid
            ):
                session.heartbeat, session.alive_at = int(seen.get("heartbeat", session.heartbeat)), now
            session.stale = session.alive_at < now
            if session.stale and limit and now - session.alive_at > limit:
                reason = f"its process (pid {session.peer.pid}) has been stopped for more than {limit} s"
                await self.end(session, Closing.STOPPED, reason)

    def _info(self, session: Session, stats: dict[str, Any]) -> SessionInfo:
        request = session.request
        return SessionInfo(
            session_id=session.session_id,
            model=session.entry.name,
            client=request.client,
            address=request.address,
            pid=session.peer.pid,
            uid=session.peer.uid,
            priority=session.priority,
            share=self.share(session),
            attached_seconds=time.monotonic() - session.attached_at,
            max_tokens=request.max_tokens,
            num_slots=request.num_slots,
            shm_bytes=session.shm_bytes,
            requests=stats.get("requests", 0),
            tokens=stats.get("tokens", 0),
            errors=stats.get("errors", 0),
            in_flight=stats.get("in_flight", 0),
            tokens_in_flight=stats.get("tokens_in_flight", 0),
            queued_ms_total=stats.get("queued_ns", 0) / 1e6,
            compute_ms_total=stats.get("compute_ns", 0) / 1e6,
            client_wait_ms_total=stats.get("client_wait_ns", 0) / 1e6,
            use=self._ledger.use(session, stats),
            wait_ms_p50=stats.get("wait_us_p50", 0) / 1e3,
            wait_ms_p99=stats.get("wait_us_p99", 0) / 1e3,
            service_ms_p50=stats.get("service_us_p50", 0) / 1e3,
            service_ms_p99=stats.get("service_us_p99", 0) / 1e3,
            batched=stats.get("batched", 0),
            throttled_ms_total=stats.get("throttled_ns", 0) / 1e6,
            last_active_seconds=stats.get("last_active_ns_ago", 0) / 1e9,
            stale=session.stale,
        )
