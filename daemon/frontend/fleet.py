"""Which workers there are to be, as the administrator says while the front-end runs, and how they are in all processes.

Owns the wanted list: it begins as the configuration's, changes by `add`, `drain` and `remove`, and is told whole to
every process, also to one that starts later; so processes cannot come to differ, and telling it twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import BaseModel

from syshax.errors import InvalidArgumentError, NotFoundError
from syshax.front import WorkerInfo
from syshaxd.frontend.config import DEFAULT_GROUP, ApiConfig, check_worker

AskAll = Callable[..., Awaitable[list[Any]]]
_FEW = 8


class Wanted(BaseModel):
    """A worker that is to be there."""

    url: str
    group: str
    draining: bool = False


class Seen(BaseModel):
    """A worker as one process sees it; numbers are those of all, of every worker that has had this URL."""

    url: str
    group: str
    ready: bool
    reason: str
    experts: str
    models: list[str]
    outstanding: int
    requests: int
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None


def configured(config: ApiConfig) -> list[Wanted]:
    return [Wanted(url=url, group=name) for name, group in config.worker_groups().items() for url in group.workers]


class Fleet:
    """`ask_all(name, **fields)` has every process do a command and gives their answers."""

    def __init__(self, config: ApiConfig, ask_all: AskAll) -> None:
        self._groups = list(config.worker_groups())
        self._wanted = {wanted.url: wanted for wanted in configured(config)}
        self._configured = frozenset((wanted.url, wanted.group) for wanted in self._wanted.values())
        self._ask_all = ask_all

    def wanted(self) -> list[dict[str, Any]]:
        """For a process, made for JSON."""
        return [wanted.model_dump() for wanted in self._wanted.values()]

    async def add(self, url: str, group: str | None) -> Wanted:
        """Raises InvalidArgumentError: no worker's URL, no such group, there already."""
        try:
            url = check_worker(url)
        except ValueError as error:
            raise InvalidArgumentError(f"{url}: {error}") from None
        if url in self._wanted:
            raise InvalidArgumentError(
                f"worker {url} is there already, in group {self._wanted[url].group}", "syshaxctl workers"
            )
        wanted = Wanted(url=url, group=self._group(group))
        self._wanted[url] = wanted
        await self.tell()
        return wanted

    async def drain(self, url: str, draining: bool) -> Wanted:
        wanted = self._find(url)
        wanted.draining = draining
        await self.tell()
        return wanted

    async def remove(self, url: str) -> Wanted:
        wanted = self._find(url)
        del self._wanted[wanted.url]
        await self.tell()
        return wanted

    async def tell(self) -> None:
        """Has every process make it so."""
        await self._ask_all("set_workers", wanted=self.wanted())

    async def look(self) -> tuple[int, list[WorkerInfo]]:
        """How many processes answered, and all workers: those wanted, then those that are leaving."""
        answers = [[Seen.model_validate(row) for row in rows] for rows in await self._ask_all("workers")]
        found: dict[tuple[str, str], list[Seen]] = {(wanted.url, wanted.group): [] for wanted in self._wanted.values()}
        for seen in (seen for rows in answers for seen in rows):
            found.setdefault((seen.url, seen.group), []).append(seen)
        return len(answers), [self._info(url, group, rows, len(answers)) for (url, group), rows in found.items()]

    def permanent(self, group: str) -> str:
        """The line of the configuration that makes the group's workers what they are now."""
        urls = ", ".join(f'"{wanted.url}"' for wanted in self._wanted.values() if wanted.group == group)
        table = "" if group == DEFAULT_GROUP else f"[groups.{group}] "
        return f"{table}workers = [{urls}]"

    def _group(self, named: str | None) -> str:
        choices = ", ".join(self._groups)
        if named is None:
            if len(self._groups) > 1 and DEFAULT_GROUP not in self._groups:
                raise InvalidArgumentError(f"there are several groups: {choices}", "name one with --group")
            return DEFAULT_GROUP if DEFAULT_GROUP in self._groups else self._groups[0]
        if named not in self._groups:
            raise InvalidArgumentError(
                f"there is no group {named!r}; the configuration has: {choices}",
                f"a new group is a table [groups.{named}] of the configuration, then a restart",
            )
        return named

    def _find(self, url: str) -> Wanted:
        found = self._wanted.get(url) or self._wanted.get(url.rstrip("/"))
        if found is None:
            known = list(self._wanted)
            more = f" and {len(known) - _FEW} more" if len(known) > _FEW else ""
            raise NotFoundError(f"there is no worker {url}", f"workers: {', '.join(known[:_FEW]) or 'none'}{more}")
        return found

    def _info(self, url: str, group: str, rows: Sequence[Seen], processes: int) -> WorkerInfo:
        ready = sum(row.ready for row in rows)
        reason = next((row.reason for row in rows if row.reason), "")
        wanted = self._wanted.get(url)
        if wanted is None or wanted.group != group:
            state, reason = "leaving", ""
        elif wanted.draining:
            state, reason = "draining", ""
        elif ready == processes > 0:
            state = "ready"
        elif ready:
            state, reason = "partly ready", f"ready in {ready} of {processes} processes: {reason}"
        else:
            state = "not ready"
        if not rows:  # all processes are starting
            reason = "no process of the front-end answers now"
            return WorkerInfo(url=url, group=group, state="not ready", reason=reason)
        shown = rows[0].model_dump(exclude={"ready", "reason"})
        return WorkerInfo(**shown, state=state, reason=reason, configured=(url, group) in self._configured)
