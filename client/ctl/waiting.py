"""Waiting for what takes a while: a load, followed with a progress bar on a terminal and a line now and then elsewhere,
both on stderr; a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from syshax.control import Control
from syshax.ctl import screens, units
from syshax.errors import (
    CancelledError,
    DaemonAbsentError,
    DaemonLostError,
    ModelNotReadyError,
    RequestTimeoutError,
    ShuttingDownError,
    UnknownModelError,
)
from syshax.protocol import ModelInfo, ModelState, RestartAnswer, RestartRequest, StatusAnswer

POLL_SECONDS = 0.25
LINE_SECONDS = 10.0
RESTART_POLL_SECONDS = 0.1
RESTART_SECONDS = 120.0
"""More than limits.drain_seconds and a start; a drain may be set to take longer."""


def wait_until_ready(control: Control, model: ModelInfo, errors: Console) -> ModelInfo:
    """The model once it is ready. ModelNotReadyError with the reason when it failed, CancelledError when it is gone."""
    with _display(errors, model.name) as show:
        while model.state is ModelState.LOADING or model.state is ModelState.CONFIGURED:
            show(model)
            time.sleep(POLL_SECONDS)
            try:
                model = control.get(f"/v1/models/{model.name}", ModelInfo)
            except UnknownModelError:
                raise CancelledError(f"the load of {model.name} was cancelled: the daemon no longer has it") from None
        show(model)
    if model.state is ModelState.READY:
        return model
    if model.state is ModelState.UNLOADING:
        raise CancelledError(f"the load of {model.name} was cancelled: it is being unloaded")
    raise ModelNotReadyError(
        f"loading {model.name} failed: {model.reason or 'the daemon gave no reason'}",
        "the daemon's log has more: journalctl -u syshaxd",
    )


def restart(control: Control, drain: bool) -> StatusAnswer:
    """Asks for a restart; the next daemon's status once it serves. RequestTimeoutError when none comes in time."""
    ended = control.post("/v1/restart", RestartRequest(drain=drain), RestartAnswer)
    deadline = time.monotonic() + RESTART_SECONDS
    while True:
        reason = f"the old one (pid {ended.pid}) is still there"
        try:
            status = control.get("/v1/status", StatusAnswer)
            if status.boot_id != ended.boot_id:
                return status
        except (DaemonAbsentError, DaemonLostError, ShuttingDownError, RequestTimeoutError) as error:
            reason = error.message
        if time.monotonic() >= deadline:
            raise RequestTimeoutError(
                f"no new daemon serves {RESTART_SECONDS:g} s after the restart was asked for: {reason}",
                "systemctl status syshaxd; journalctl -u syshaxd",
            )
        time.sleep(RESTART_POLL_SECONDS)


@contextmanager
def _display(errors: Console, name: str) -> Iterator[Callable[[ModelInfo], None]]:
    if not errors.is_terminal:
        yield _lines(errors, name)
        return
    bar = Progress(
        TextColumn("{task.fields[stage]}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=errors,
    )
    with bar:
        task = bar.add_task(name, total=None, stage=f"loading {name}", amount="")

        def show(model: ModelInfo) -> None:
            done = model.progress
            total = done.bytes_total or None
            complete = total if model.state is ModelState.READY and total else done.bytes_done
            amount = f"{units.size(complete)} of {units.size(total)}" if total else ""
            stage = f"{'loaded' if model.state is ModelState.READY else done.stage or 'loading'} {name}"
            bar.update(task, total=total, completed=complete, stage=stage, amount=amount)

        yield show


def _lines(errors: Console, name: str) -> Callable[[ModelInfo], None]:
    said = -LINE_SECONDS

    def show(model: ModelInfo) -> None:
        nonlocal said
        if model.state is ModelState.LOADING and time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            errors.print(f"loading {name}: {screens.progress_text(model)}", highlight=False, soft_wrap=True)

    return show
