"""Checks of the machine and the daemon for what makes either slow, small or unreachable; `syshaxctl doctor` shows them.

Owns the list of checks. Each looks at one thing, reads only, and says what helps. A check that does not apply here says
so and is ok.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from syshax.errors import SyshaxError
from syshax.protocol import Check, ModelState
from syshaxd import loader
from syshaxd.machine import cpu_quota, meminfo, memory_group_limit, shm_free_bytes
from syshaxd.quantities import format_cpus, human_size
from syshaxd.status import STALLED_SECONDS, Parts, Reporter

_SHMEM_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def run_checks(parts: Parts, reporter: Reporter) -> list[Check]:
    """All checks; one that fails itself is reported as such and hides no other."""
    found: list[Check] = []
    for check in _CHECKS:
        try:
            found.extend(check(parts, reporter))
        except (OSError, SyshaxError) as error:
            found.append(_warning(check.__name__.lstrip("_"), f"could not be checked: {error}"))
    return found


def _ok(name: str, message: str) -> Check:
    return Check(name=name, ok=True, level="ok", message=message)


def _warning(name: str, message: str, hint: str = "") -> Check:
    return Check(name=name, ok=False, level="warning", message=message, hint=hint)


def _error(name: str, message: str, hint: str = "") -> Check:
    return Check(name=name, ok=False, level="error", message=message, hint=hint)


def _data_plane(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    age = parts.runtime.stats()["heartbeat_age_ns"] / 1e9
    if age > STALLED_SECONDS:
        yield _error("data plane", f"its last turn was {age:.0f} s ago", "restart syshaxd; report it with the log")
    else:
        yield _ok("data plane", "turning, or asleep with nothing to do")


def _isa(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    effective, best = parts.core.isa_effective(parts.isa_cap), parts.core.isa_effective("")
    if effective != best:
        yield _warning("instruction set", f"capped at {effective}, this CPU has {best}", "compute.isa, or SYSHAX_ISA")
    else:
        yield _ok("instruction set", best)
    for name, format, dtype, chosen, better in reporter.kernels_not_best():
        text = f"{name} ({format}, {dtype}) uses {chosen}, {better} could be used"
        yield _warning("kernels", text, "load it again")


def _operators(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    for library in parts.libraries:
        name = f"operators {Path(library.path).name}"
        if library.loaded:
            yield _ok(name, f"{len(library.formats)} formats, {len(library.kernels)} kernels from {library.path}")
        else:
            yield _warning(name, library.reason, "docs/OPERATORS.md; syshaxd operators check says more")


def _cpus(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    plan = parts.plan
    present = {cpu for node in parts.topology["nodes"] for core in node["cores"] for cpu in core}
    text = f"{plan.threads} threads on CPUs {format_cpus(plan.cpus)} of {format_cpus(present)}"
    if missing := present - set(plan.allowed_cpus):
        text += f"; CPUs {format_cpus(missing)} are closed to this process"
        yield _warning("affinity", text, "AllowedCPUs=, taskset, cpuset")
    else:
        yield _ok("affinity", text)
    quota = cpu_quota()
    if quota is None:
        yield _ok("CPU quota", "none")
    elif quota < plan.threads:
        text = f"{quota:g} CPUs for {plan.threads} threads: they are throttled"
        yield _warning("CPU quota", text, "raise CPUQuota=, restart syshaxd")
    else:
        yield _ok("CPU quota", f"{quota:g} CPUs for {plan.threads} threads")
    for note in plan.notes:
        yield _warning("plan", note)


def _huge_pages(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    mode = parts.config.current().compute.huge_pages
    if mode == "off":
        yield _ok("huge pages", "off by configuration")
    elif mode == "require":
        info = meminfo()
        free = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0)
        yield _ok("huge pages", f"{human_size(free)} reserved and free, {human_size(info.get('Hugetlb', 0))} reserved")
    else:
        text = _SHMEM_THP.read_text() if _SHMEM_THP.exists() else ""
        setting = text.partition("[")[2].partition("]")[0] or "absent"
        if setting in ("advise", "always", "within_size", "force"):
            yield _ok("huge pages", f"transparent, {_SHMEM_THP} is {setting}")
        else:
            yield _warning(
                "huge pages",
                f"{_SHMEM_THP} is {setting}: weights lie in 4 KiB pages",
                f"echo advise > {_SHMEM_THP}, then load the models again",
            )


def _memory_lock(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else human_size(soft)
    yield _ok("memory lock", f"limit {text} (the daemon locks nothing; accelerators' workers need theirs)")


def _memory(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    for node in reporter.nodes():
        text = f"{human_size(node.free_bytes)} free of {human_size(node.memory_bytes)}"
        yield _ok(f"memory of node {node.node}", f"{text}, {human_size(node.pool_bytes)} of experts")
    group = memory_group_limit()
    if group is not None:
        text = f"the control group may use {human_size(group[0])}, {human_size(group[1])} are in use"
        yield _ok("memory limit", text)


def _configured_models(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    """Whether each configured model that is not loaded could be."""
    config = parts.config.current()
    for info in parts.registry.infos():
        name = f"model {info.name}"
        if info.state is ModelState.FAILED:
            yield _error(name, info.reason, "remove the cause, then `syshaxctl load` again")
        elif info.state is not ModelState.CONFIGURED:
            yield _ok(name, info.state.value)
        else:
            budget = loader.MemoryBudget(config.memory.limit, config.memory.reserve, parts.registry.pool_bytes())
            try:
                blueprint = loader.inspect(Path(info.path), info.format)
                blueprint = loader.sized(parts.core, parts.runtime, parts.plan, blueprint)
                loader.check_memory(parts.core, parts.plan, blueprint, budget)
            except SyshaxError as error:
                yield _warning(name, error.message, error.hint)
            else:
                yield _ok(name, f"not loaded; would need {human_size(sum(blueprint.node_bytes))}")


def _shared_memory(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    free, size = shm_free_bytes()
    text = f"/dev/shm has {human_size(free)} of {human_size(size)} free"
    if size < 1 << 30:
        text += ": large batches will not fit"
        yield _warning("shared memory", text, "mount -o remount,size=..., or --shm-size")
    else:
        yield _ok("shared memory", text)


def _group(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    group = parts.config.current().access.group
    if parts.group_found:
        yield _ok("group", f"{group}, or private to one user")
    else:
        text = f"there is no group {group}: only root may attach"
        yield _warning("group", text, f"groupadd {group}, restart syshaxd")


def _sessions(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    stale = [session for session in parts.sessions if session.stale]
    for session in stale:
        text = f"session {session.session_id}: its process (pid {session.peer.pid}) is stopped"
        yield _warning("sessions", text, "kill -CONT, or end it")
    if not stale:
        yield _ok("sessions", f"{len(parts.sessions)} attached, none stopped")


def _restart(parts: Parts, reporter: Reporter) -> Iterator[Check]:
    waiting = parts.config.needs_restart()
    if waiting:
        yield _warning("configuration", f"in force only after a restart: {', '.join(waiting)}", "restart syshaxd")
    else:
        yield _ok("configuration", "all of it is in force")


_CHECKS: tuple[Callable[[Parts, Reporter], Iterator[Check]], ...] = (
    _data_plane,
    _isa,
    _operators,
    _cpus,
    _huge_pages,
    _memory_lock,
    _memory,
    _configured_models,
    _shared_memory,
    _group,
    _sessions,
    _restart,
)
