"""Checks of the daemon for what makes it slow, small or unreachable; `syshaxctl doctor` shows them.

Owns the list of checks that need the daemon's own parts. Each looks at one thing, reads only, and says what it costs
and what helps; one that does not apply here says so and is ok. The machine is looked at from here too, with the rules
of syshax.doctor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from syshax.doctor.findings import error, fine, run_all, warning
from syshax.doctor.machine import check_machine
from syshax.doctor.snapshot import Snapshot
from syshax.errors import SyshaxError
from syshax.protocol import PROTOCOL_VERSION, Check, ModelState
from syshaxd import loader
from syshaxd.machine import cpu_quota, meminfo, memory_group_limit
from syshaxd.quantities import format_cpus, human_size
from syshaxd.status import STALLED_SECONDS, Parts, Reporter, version

Subject = tuple[Parts, Reporter]
_MOSTLY = 0.9
"""Of the experts' bytes in huge pages: less is worth a word."""


def run_checks(parts: Parts, reporter: Reporter) -> list[Check]:
    """All checks; one that fails itself is reported as such and hides no other."""
    return [*run_all(_CHECKS, (parts, reporter)), *check_machine(Snapshot.read(units=False))]


def versions(parts: Parts) -> dict[str, str]:
    """What the client compares its own with."""
    ring = parts.core.ring_abi()["constants"]["version_major"]
    return {"syshax": version(), "protocol": str(PROTOCOL_VERSION), "ring": str(ring)}


def _data_plane(subject: Subject) -> Iterator[Check]:
    age = subject[0].runtime.stats()["heartbeat_age_ns"] / 1e9
    if age > STALLED_SECONDS:
        text = f"its last turn was {age:.0f} s ago"
        yield error("data plane", text, "requests wait without end", "journalctl -u syshaxd; systemctl restart syshaxd")
    else:
        yield fine("data plane", "turning, or asleep with nothing to do")


def _isa(subject: Subject) -> Iterator[Check]:
    parts, reporter = subject
    effective, best = parts.core.isa_effective(parts.isa_cap), parts.core.isa_effective("")
    if effective != best:
        text, cost = f"capped at {effective}, this CPU has {best}", "kernels are slower than this CPU allows"
        hint = "syshaxctl config show compute.isa --origin names what caps it; take it out, restart syshaxd"
        yield warning("instruction set", text, cost, hint)
    else:
        yield fine("instruction set", best)
    for name, format, dtype, chosen, better in reporter.kernels_not_best():
        text, cost = f"{name} ({format}, {dtype}) uses {chosen}", f"{better} would be faster"
        yield warning("kernels", text, cost, f"syshaxctl unload {name}; syshaxctl load --name {name}")


def _operators(subject: Subject) -> Iterator[Check]:
    for library in subject[0].libraries:
        name = f"operators {Path(library.path).name}"
        if library.loaded:
            yield fine(name, f"{len(library.formats)} formats, {len(library.kernels)} kernels from {library.path}")
        else:
            cost = "its formats and kernels are not there"
            yield warning(name, library.reason, cost, f"syshaxd operators check {library.path}")


def _cpus(subject: Subject) -> Iterator[Check]:
    parts = subject[0]
    plan = parts.plan
    present = {cpu for node in parts.topology["nodes"] for core in node["cores"] for cpu in core}
    text = f"{plan.threads} threads on CPUs {format_cpus(plan.cpus)} of {format_cpus(present)}"
    if gone := plan.gone_cpus():
        text += f"; CPUs {format_cpus(gone)} are offline or closed to this process since it started"
        yield error(
            "affinity", text, "their threads crowd the others' CPUs", "systemctl restart syshaxd, which plans anew"
        )
    elif missing := present - set(plan.allowed_cpus):
        text += f"; CPUs {format_cpus(missing)} are closed to this process"
        hint = "systemctl edit syshaxd (AllowedCPUs=, CPUAffinity=), or taskset's or the container's CPUs"
        yield warning("affinity", text, "these CPUs compute nothing", hint)
    else:
        yield fine("affinity", text)
    quota = cpu_quota()
    if quota is None:
        yield fine("CPU quota", "none")
    elif quota < plan.threads:
        text = f"{quota:g} CPUs for {plan.threads} threads"
        yield warning(
            "CPU quota",
            text,
            "threads are stopped in the middle of a layer, and all others wait for them",
            "systemctl edit syshaxd (CPUQuota=), then systemctl restart syshaxd",
        )
    else:
        yield fine("CPU quota", f"{quota:g} CPUs for {plan.threads} threads")
    for note in plan.notes:
        yield warning("plan", note, "less of the machine computes than could", "syshaxctl topology; compute.threads")


def _huge_pages(subject: Subject) -> Iterator[Check]:
    """What loaded models have; what the machine offers is machine.huge_pages."""
    parts, reporter = subject
    mode, name = parts.config.current().compute.huge_pages, "experts' pages"
    held = sum(node.pool_bytes for node in reporter.nodes())
    huge = sum(node.huge_bytes for node in reporter.nodes())
    if mode == "off":
        yield fine(name, "4 KiB by configuration (compute.huge_pages)")
    elif mode == "require":
        info = meminfo()
        free = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0)
        yield fine(name, f"{human_size(free)} reserved and free, {human_size(info.get('Hugetlb', 0))} reserved")
    elif held and huge < held * _MOSTLY:
        text = f"{human_size(huge)} of {human_size(held)} are huge"
        cost = "more misses of the address cache in every product"
        yield warning(name, text, cost, "echo 1 > /proc/sys/vm/compact_memory, then load the models again")
    else:
        yield fine(name, f"{human_size(huge)} of {human_size(held)} are huge" if held else "no experts are loaded")


def _memory(subject: Subject) -> Iterator[Check]:
    for node in subject[1].nodes():
        text = f"{human_size(node.free_bytes)} free of {human_size(node.memory_bytes)}"
        yield fine(f"memory of node {node.node}", f"{text}, {human_size(node.pool_bytes)} of experts")
    group = memory_group_limit()
    if group is not None:
        text = f"the control group may use {human_size(group[0])}, {human_size(group[1])} are in use"
        yield fine("memory limit", text)


def _cache(subject: Subject) -> Iterator[Check]:
    cache = subject[0].cache
    answer = cache.answer("")
    if not answer.enabled:
        yield fine("packed cache", "none" if not answer.directory else "switched off (cache.enabled)")
        return
    sizes = f"{human_size(answer.bytes)} of {human_size(answer.limit_bytes)} in {answer.directory}"
    if cache.counts["skipped"]:
        yield warning(
            "packed cache",
            f"{sizes}; {cache.counts['skipped']} models were not written",
            "their next load converts the checkpoint again",
            "journalctl -u syshaxd names the reason; syshaxctl cache prune, cache.limit, cache.reserve",
        )
    else:
        yield fine("packed cache", sizes)


def _configured_models(subject: Subject) -> Iterator[Check]:
    """Whether each configured model that is not loaded could be."""
    parts = subject[0]
    config = parts.config.current()
    for info in parts.registry.infos():
        name = f"model {info.name}"
        if info.state is ModelState.FAILED:
            yield error(name, info.reason, "workers that need it wait", f"syshaxctl load --name {info.name} --wait")
        elif info.state is not ModelState.CONFIGURED:
            yield fine(name, info.state.value)
        else:
            budget = loader.MemoryBudget(config.memory.limit, config.memory.reserve, parts.registry.pool_bytes())
            try:
                blueprint = loader.inspect(Path(info.path), info.format)
                blueprint = loader.sized(parts.core, parts.runtime, parts.plan, blueprint)
                loader.check_memory(parts.core, parts.plan, blueprint, budget)
            except SyshaxError as failure:
                yield warning(name, failure.message, "it cannot be loaded", failure.hint)
            else:
                yield fine(name, f"not loaded; would need {human_size(sum(blueprint.node_bytes))}")


def _group(subject: Subject) -> Iterator[Check]:
    parts = subject[0]
    group = parts.config.current().access.group
    if parts.group_found:
        yield fine("access", f"group {group}, or private to one user")
    else:
        hint = f"groupadd -r {group} && systemctl restart syshaxd"
        yield warning("access", f"there is no group {group}", "only root may attach", hint)


def _sessions(subject: Subject) -> Iterator[Check]:
    sessions = subject[0].sessions
    stale = [session for session in sessions if session.stale]
    for session in stale:
        text = f"session {session.session_id}: its process (pid {session.peer.pid}) is stopped"
        yield warning("sessions", text, "its ring's memory is held for nobody", f"kill -CONT {session.peer.pid}")
    if not stale:
        yield fine("sessions", f"{len(sessions)} attached, none stopped")


def _restart(subject: Subject) -> Iterator[Check]:
    waiting = subject[0].config.needs_restart()
    if waiting:
        text, cost = f"not in force yet: {', '.join(waiting)}", "the old values hold"
        yield warning("configuration", text, cost, "systemctl restart syshaxd")
    else:
        yield fine("configuration", "all of it is in force")


_CHECKS: tuple[Callable[[Subject], Iterator[Check]], ...] = (
    _data_plane,
    _isa,
    _operators,
    _cpus,
    _huge_pages,
    _memory,
    _cache,
    _configured_models,
    _group,
    _sessions,
    _restart,
)
