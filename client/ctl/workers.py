"""`syshaxctl workers`: the vLLM workers behind syshax-api, seen and changed over its own control socket."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from syshax.ctl import units, values
from syshax.ctl.context import Context, context_of
from syshax.ctl.screens import STATE_STYLE, remarks, table
from syshax.front import (
    WorkerAddRequest,
    WorkerChangeAnswer,
    WorkerDrainRequest,
    WorkerInfo,
    WorkersAnswer,
)

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
Url = Annotated[str, typer.Argument(metavar="URL", help="As the list shows it.")]


@app.callback()
def workers(context: typer.Context) -> None:
    """Show the vLLM workers behind syshax-api, or change them until its next restart."""
    if context.invoked_subcommand is None:
        show_all(context_of(context))


@app.command("list")
def workers_list(context: typer.Context) -> None:
    """Every worker with its state."""
    show_all(context_of(context))


@app.command("add")
def workers_add(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="http://HOST:PORT or unix:PATH.")],
    group: Annotated[
        str | None, typer.Option(help="One of the configuration's groups [default].", show_default=False)
    ] = None,
) -> None:
    """One more worker."""
    ctl = context_of(context)
    ctl.show(ctl.front.post("/v1/workers", WorkerAddRequest(url=url, group=group), WorkerChangeAnswer), changed)


@app.command("drain")
def workers_drain(context: typer.Context, url: Url) -> None:
    """It finishes what it has and gets nothing new."""
    _set_draining(context_of(context), url, True)


@app.command("undrain")
def workers_undrain(context: typer.Context, url: Url) -> None:
    """It gets requests again."""
    _set_draining(context_of(context), url, False)


@app.command("remove")
def workers_remove(context: typer.Context, url: Url) -> None:
    """It finishes what it has, within the front-end's timeouts.drain_seconds, then it is gone."""
    ctl = context_of(context)
    answer = ctl.front.delete(_path(url), WorkerChangeAnswer)
    assert answer is not None
    ctl.show(answer, changed)


def _set_draining(ctl: Context, url: str, draining: bool) -> None:
    request = values.request(WorkerDrainRequest, draining=draining)
    ctl.show(ctl.front.patch(_path(url), request, WorkerChangeAnswer), changed)


def _path(url: str) -> str:
    return f"/v1/workers/{quote(url, safe='')}"


def show_all(ctl: Context) -> None:
    ctl.show(ctl.front.get("/v1/workers", WorkersAnswer), listed)


def listed(answer: WorkersAnswer) -> RenderableType:
    """The table, and below it what is wrong."""
    if not answer.workers:
        return Text("no workers", style="dim")
    made = table("~Worker, models", "Group", "State", ">Now", ">Requests", ">TTFT ms")
    for worker in answer.workers:
        made.add_row(
            Text(", ".join([worker.url, *worker.models])),
            worker.group,
            Text(worker.state, style=STATE_STYLE.get(worker.state, "red")),
            str(worker.outstanding),
            units.count(worker.requests),
            _ttft(worker),
        )
    troubles = [(f"{worker.url}:", text) for worker in answer.workers if (text := _trouble(worker))]
    legend = [("TTFT:", "time to the first token of streams, median / 99th percentile since the front-end began")]
    return Group(made, "", *([remarks(troubles, "yellow")] if troubles else []), remarks(legend, "dim"))


def changed(answer: WorkerChangeAnswer) -> RenderableType:
    return Text(
        f"{answer.url} {answer.message}\n"
        f"until the next restart of syshax-api; to keep the workers of group {answer.group} as they are now,\n"
        f"its configuration needs: {answer.permanent}"
    )


def _ttft(worker: WorkerInfo) -> str:
    if worker.ttft_ms_p50 is None or worker.ttft_ms_p99 is None:
        return "-"
    return f"{worker.ttft_ms_p50:.0f} / {worker.ttft_ms_p99:.0f}"


def _trouble(worker: WorkerInfo) -> str:
    said = [worker.reason] if worker.reason else []
    if worker.experts == "not known":
        said.append("experts: not known")
    if not worker.configured:
        said.append("added by hand: gone at the next restart")
    return "; ".join(said)
