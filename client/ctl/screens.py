"""What people see of each answer: protocol messages in, rich renderables out. No I/O.

Tables keep to 80 columns; columns that matter least fold. Colours mean state only and vanish where there is no
terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import tomli_w
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from syshax.ctl import units
from syshax.protocol import (
    CacheAnswer,
    CachePruneAnswer,
    Check,
    ConfigAnswer,
    ConfigChangeAnswer,
    DoctorAnswer,
    KernelsAnswer,
    ModelInfo,
    ModelsAnswer,
    ModelState,
    NodeInfo,
    Origin,
    SessionInfo,
    SessionsAnswer,
    StatusAnswer,
    TopologyAnswer,
)

STATE_STYLE = {
    "ready": "green",
    "loading": "cyan",
    "starting": "cyan",
    "configured": "",
    "unloading": "yellow",
    "draining": "yellow",
    "degraded": "yellow",
    "failed": "red",
    "partly ready": "yellow",
    "leaving": "yellow",
}
_LONGEST_CLIENT = 40
_IDLE_SECONDS = 60
_CHECK_STYLE = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "red")}


def table(*columns: str) -> Table:
    """A plain table; a column's name begins with ">" when it holds numbers, with "~" when it may fold."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        name = column.lstrip(">~")
        made.add_column(
            name,
            justify="right" if column.startswith(">") else "left",
            no_wrap=not column.startswith("~"),
            overflow="fold",
        )
    return made


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLE.get(state, ""))


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2))


def remarks(lines: Iterable[tuple[str, str]], style: str) -> Table:
    """Hanging paragraphs: a mark, then text that folds under itself."""
    notes = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    notes.add_column(no_wrap=True, style=style)
    notes.add_column(overflow="fold")
    for mark, text in lines:
        notes.add_row(mark, Text(text))
    return notes


# -------------------------------------------------------------------- status


def status(answer: StatusAnswer) -> RenderableType:
    """One screen: daemon, CPU, nodes, models, sessions, warnings."""
    parts: list[RenderableType] = [_daemon(answer), "", nodes(answer.nodes), ""]
    if answer.models:
        parts += [models_table(answer.models)]
    else:
        parts += [Text("no models: syshaxctl load PATH --name NAME --format FORMAT", style="dim")]
    if answer.warnings:
        parts += ["", remarks((("warning:", text) for text in answer.warnings), "yellow")]
    return Group(*parts)


def _daemon(answer: StatusAnswer) -> Table:
    head = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    state = Text.assemble(
        (answer.state, STATE_STYLE.get(answer.state, "")),
        f", up {units.duration(answer.uptime_seconds)}, version {answer.version}, pid {answer.pid}",
    )
    head.add_row("syshaxd", state)
    if answer.reason:
        head.add_row("", Text(answer.reason, style=STATE_STYLE.get(answer.state, "")))
    isa = answer.isa if answer.isa == answer.isa_best else f"{answer.isa} (this CPU can do {answer.isa_best})"
    head.add_row("CPU", Text(f"{answer.cpu}, kernels for {isa}"))
    limit = f" of {units.size(answer.memory_limit_bytes)} allowed" if answer.memory_limit_bytes else ""
    head.add_row("experts", f"{units.size(answer.pool_bytes)}{limit}")
    sessions = "1 session" if answer.sessions == 1 else f"{answer.sessions} sessions"
    failed = f", {units.count(answer.requests_failed)} failed" if answer.requests_failed else ""
    head.add_row(
        "work",
        f"{sessions}, {units.count(answer.requests_completed)} requests{failed}, {units.count(answer.tokens)} tokens, "
        f"{units.duration(answer.compute_seconds)} computing",
    )
    return head


def restarted(answer: StatusAnswer) -> RenderableType:
    """What the new daemon has of the old one's."""
    kept = sum(model.origin == "restart" for model in answer.models)
    loading = sum(model.state is ModelState.LOADING for model in answer.models)
    words = f"syshaxd {answer.version} serves again (pid {answer.pid}): {kept} models were kept"
    return f"{words}, {loading} are loading" if loading else words


def nodes(rows: list[NodeInfo]) -> Table:
    """NUMA nodes: what runs and lies where."""
    made = table(">Node", "~CPUs", ">Threads", ">Share", ">Busy", ">Experts", ">Huge", ">Free", ">Memory")
    for node in rows:
        huge = units.percent(node.huge_bytes / node.pool_bytes) if node.pool_bytes else "-"
        made.add_row(
            str(node.node),
            units.cpu_ranges(node.cpus),
            str(node.threads),
            units.percent(node.share),
            units.percent(node.busy_fraction),
            units.size(node.pool_bytes),
            huge,
            units.size(node.free_bytes),
            units.size(node.memory_bytes),
        )
    return made


# -------------------------------------------------------------------- models


def models(answer: ModelsAnswer) -> RenderableType:
    if not answer.models:
        return Text("no models: syshaxctl load PATH --name NAME --format FORMAT", style="dim")
    return models_table(answer.models)


def models_table(rows: list[ModelInfo]) -> RenderableType:
    """One line a model, and under it what is not a number: why it failed, how far it is, its kernels."""
    made = table("Model", "State", "Format", "~Experts", ">Size", ">Sessions", ">Calls")
    notes: list[tuple[str, str]] = []
    for model in rows:
        geometry = model.geometry
        made.add_row(
            Text(model.name),
            _state(model.state.value),
            model.format,
            f"{geometry.num_layers} x {geometry.num_experts}, top {geometry.top_k}" if geometry else "-",
            units.size(sum(model.node_bytes.values())) if model.node_bytes else "-",
            str(model.sessions),
            units.count(model.forward_calls),
        )
        if note := model_note(model):
            notes.append((f"{model.name}:", note))
    return Group(made, "", remarks(notes, "bold")) if notes else made


def model_note(model: ModelInfo) -> str:
    """What a model's line cannot say: how far a load is, why it failed, which kernels a ready one uses."""
    if model.state is ModelState.LOADING:
        return progress_text(model)
    if model.state is ModelState.FAILED:
        return model.reason or "failed without a reason"
    if model.kernels:
        by_kernel: dict[str, list[str]] = {}
        for dtype, kernel in model.kernels.items():
            by_kernel.setdefault(kernel, []).append(dtype.value)
        return ", ".join(f"{kernel} for {'/'.join(dtypes)}" for kernel, dtypes in by_kernel.items())
    return model.reason


def progress_text(model: ModelInfo) -> str:
    """How far a load is, in one line."""
    done = model.progress
    parts = [done.stage or "starting"]
    if done.bytes_total:
        parts.append(f"{units.percent(done.bytes_done / done.bytes_total)} of {units.size(done.bytes_total)}")
    if done.layers_total:
        parts.append(f"layer {done.layers_done} of {done.layers_total}")
    parts.append(units.duration(done.seconds))
    return ", ".join(parts)


# ------------------------------------------------------------------ sessions


def sessions(answer: SessionsAnswer) -> RenderableType:
    if not answer.sessions:
        return Text("no sessions: no worker is attached", style="dim")
    made = table(">ID", "~Worker (pid), model", "Class", ">Use", ">Tokens", ">Wait ms", ">Service ms")
    for session in answer.sessions:
        made.add_row(
            str(session.session_id),
            Text(f"{_shortened(session.client) or '-'} ({session.pid}), {session.model}"),
            session.priority.value,
            _use(session),
            units.count(session.tokens),
            _median_and_worst(session.wait_ms_p50, session.wait_ms_p99, session.requests),
            _median_and_worst(session.service_ms_p50, session.service_ms_p99, session.requests),
        )
    notes = [("warning:", text) for session in answer.sessions for text in _session_troubles(session)]
    legend = remarks(
        [
            ("use:", "of the data plane's time in the last seconds"),
            (
                "wait, service:",
                "before a call begins, and from there on: median / 99th percentile since attaching",
            ),
        ],
        "dim",
    )
    return Group(made, "", *([remarks(notes, "yellow")] if notes else []), legend)


def _shortened(name: str) -> str:
    """What a client calls itself: no more of it than fits, and nothing that a terminal would obey."""
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    return name if len(name) <= _LONGEST_CLIENT else f"{name[: _LONGEST_CLIENT - 1]}…"


def _use(session: SessionInfo) -> str:
    """Of the data plane's time, and of how much it may take; of one that does nothing, for how long."""
    if session.last_active_seconds >= _IDLE_SECONDS and not session.in_flight:
        return f"idle {' '.join(units.duration(round(session.last_active_seconds)).split()[:2])}"
    return units.percent(session.use) if session.share == 100 else f"{session.use * 100:.0f} of {session.share} %"


def _session_troubles(session: SessionInfo) -> Iterable[str]:
    if session.stale:
        yield f"session {session.session_id} (pid {session.pid}) is stale: its process is stopped"
    if session.errors:
        yield f"session {session.session_id}: {units.count(session.errors)} calls failed"
    if session.throttled_ms_total >= 1000:
        seconds = units.duration(round(session.throttled_ms_total / 1000))
        yield f"session {session.session_id} waited {seconds} for its share of {session.share} %"


def _median_and_worst(median: float, worst: float, requests: int) -> str:
    return f"{units.milliseconds(median)} / {units.milliseconds(worst)}" if requests else "-"


def session_changed(session: SessionInfo) -> RenderableType:
    share = "no limit to its share" if session.share == 100 else f"at most {session.share} % of the data plane's time"
    return f"session {session.session_id} ({session.client or session.model}): {session.priority.value}, {share}"


# ------------------------------------------------------- topology and kernels


def topology(answer: TopologyAnswer) -> RenderableType:
    quota = "none" if answer.quota_cpus is None else f"{answer.quota_cpus:g} CPUs"
    machine = table(">Node", ">Memory", ">Cores", "~CPUs (siblings together)")
    for node in answer.nodes:
        cores = node.get("cores") or []
        machine.add_row(
            str(node.get("node", "?")),
            units.size(int(node.get("memory_bytes", 0))),
            str(len(cores)),
            _cores_text(cores),
        )
    facts = Text(f"allowed CPUs {units.cpu_ranges(answer.allowed_cpus)}, quota {quota}, seen by {answer.source}")
    return Group(
        Text("machine", style="bold"), _indented(machine), _indented(facts), "",
        Text("plan", style="bold"), _indented(nodes(answer.plan)),
    )  # fmt: skip


def _cores_text(cores: list[Any]) -> str:
    if all(len(core) == 1 for core in cores):
        return units.cpu_ranges([core[0] for core in cores])
    text = " ".join("+".join(str(cpu) for cpu in core) for core in cores[:32])
    return text if len(cores) <= 32 else f"{text} and {len(cores) - 32} more"


def kernels(answer: KernelsAnswer) -> RenderableType:
    """A name is WEIGHT_ACTIVATION_ISA."""
    made = table("Kernel", "Packing", "Usable", "~Chosen for", "~Vendor")
    for kernel in answer.kernels:
        made.add_row(
            kernel.name,
            kernel.packing,
            Text("yes", style="green") if kernel.usable else Text("no", style="dim"),
            ", ".join(dtype.value for dtype in kernel.chosen_for) or "-",
            kernel.vendor,
        )
    features = remarks([("CPU features:", " ".join(answer.cpu_features)), ("kernels up to:", answer.isa)], "bold")
    if not answer.libraries:
        return Group(features, "", made)
    notes = [
        (f"{library.path}:", ", ".join(library.formats + library.kernels) if library.loaded else library.reason)
        for library in answer.libraries
    ]
    refused = any(not library.loaded for library in answer.libraries)
    heading = Text("operator libraries" + (", some of them refused" if refused else ""), style="bold")
    return Group(features, "", made, "", heading, remarks(notes, "bold"))


# -------------------------------------------------------------------- config


def config(answer: ConfigAnswer, under: str = "", origin: bool = False) -> RenderableType:
    """Dotted keys with values as TOML; `under` limits it to a key or table; `origin` shows lines of files and what the
    daemon was started with."""
    made = table("~Key", "~Value", "~Set in")
    for key, value in flat(answer.effective):
        if under and key != under and not key.startswith(f"{under}."):
            continue
        source = answer.sources.get(key, "default")
        if origin and key in answer.origins:
            source = origin_text(answer.origins[key])
        style = "dim" if source == "default" else ""
        made.add_row(Text(key, style=style), Text(toml_value(value), style=style), Text(source, style=style))
    if not made.row_count:
        return Text(f"no key {under}" if under else "no configuration")
    for option in answer.start if origin and not under else []:
        made.add_row(Text(option.name), Text(option.value), Text(origin_text(option.origin)))
    if not answer.needs_restart:
        return made
    waiting = ", ".join(answer.needs_restart)
    return Group(made, "", remarks([("restart needed:", f"{waiting} (systemctl restart syshaxd)")], "yellow"))


def origin_text(origin: Origin) -> str:
    """ "/etc/syshax/syshaxd.toml:12", "drop-in /etc/.../10.toml:3", "config set", "SYSHAX_ISA", "default"."""
    line = f":{origin.line}" if origin.line else ""
    words = {
        "file": f"{origin.where}{line}",
        "drop-in": f"drop-in {origin.where}{line}",
        "state": f"config set, {origin.where}{line}",
        "environment": f"variable {origin.where}",
    }
    return words.get(origin.kind, origin.kind)


def flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted key and value of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def toml_value(value: Any) -> str:
    """A value as it is written in the configuration file; "-" for one that is not set."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return tomli_w.dumps({"x": value}, multiline_strings=False).removeprefix("x = ").strip()


def config_change(answer: ConfigChangeAnswer) -> RenderableType:
    """The keys by what became of them. The daemon's message says that in a sentence: it is shown when no key is."""
    lines = [(f"{name}:", ", ".join(keys)) for name, keys in _change_groups(answer) if keys]
    return remarks(lines or [("unchanged:", answer.message or "nothing differs")], "bold")


def _change_groups(answer: ConfigChangeAnswer) -> list[tuple[str, list[str]]]:
    return [
        ("applied", answer.applied),
        ("needs a restart", answer.needs_restart),
        ("unchanged", answer.unchanged),
    ]


# --------------------------------------------------------------------- cache


def cache(answer: CacheAnswer) -> RenderableType:
    if not answer.directory:
        return Text("this daemon has no packed cache", style="dim")
    state = "" if answer.enabled else ", switched off (cache.enabled)"
    sizes = f"{units.size(answer.bytes)} of {units.size(answer.limit_bytes)}, {units.size(answer.free_bytes)} free"
    facts = Text(f"{answer.directory}: {sizes}{state}")
    if not answer.entries:
        return Group(facts, Text("no entries: they are written when a model is ready", style="dim"))
    made = table("Key", "~Model", "Format", ">Size", ">Used", "State")
    for entry in answer.entries:
        state = "in use" if entry.in_use else "useless" if entry.useless else "ready"
        used = units.duration(max(0, round(time.time() - entry.used_at)))
        made.add_row(entry.key, entry.name or "-", entry.format or "-", units.size(entry.bytes), f"{used} ago", state)
    notes = [(f"{entry.key}:", entry.useless) for entry in answer.entries if entry.useless]
    return Group(facts, "", made, "", remarks(notes, "yellow")) if notes else Group(facts, "", made)


def cache_pruned(answer: CachePruneAnswer) -> RenderableType:
    lines = [("removed:", ", ".join(answer.removed))] if answer.removed else []
    lines += [("in use:", ", ".join(answer.kept))] if answer.kept else []
    return remarks([*lines, ("freed:", units.size(answer.bytes))], "bold")


# -------------------------------------------------------------------- doctor


def doctor(answer: DoctorAnswer) -> RenderableType:
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for check in answer.checks:
        mark, style = _CHECK_STYLE[level(check)]
        text = Text(check.message)
        if level(check) != "ok":
            for word, said in (("costs", check.cost), ("fix", check.hint)):
                if said:
                    text.append(f"\n{word}: {said}", style="dim")
        made.add_row(Text(mark, style=style), Text(check.name), text)
    return Group(made, "", _verdict(answer.checks))


def level(check: Check) -> str:
    """Its level; a check that failed without saying how badly is an error."""
    return "error" if not check.ok and check.level == "ok" else check.level


def _verdict(checks: list[Check]) -> Text:
    errors = sum(level(check) == "error" for check in checks)
    warnings = sum(level(check) == "warning" for check in checks)
    if not errors and not warnings:
        return Text("all is well", style="green")
    counts = ((errors, "error"), (warnings, "warning"))
    found = [f"{number} {what}{'s' if number > 1 else ''}" for number, what in counts if number]
    return Text(", ".join(found), style="red" if errors else "yellow")
