"""The command line of syshaxctl: one verb a function, each a call of the control API and a screen.

Results go to standard output (tables, or the protocol's message with --json), everything else to standard error.
Exit statuses are those of `syshax.errors`; docs/SYSHAXCTL.md lists them.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from syshax.control import Control
from syshax.ctl import screens, values, waiting, workers
from syshax.ctl.context import Context, console_on, context_of
from syshax.doctor.examination import examine
from syshax.doctor.findings import exit_status
from syshax.errors import CheckpointError, InvalidArgumentError, NotFoundError, SyshaxError
from syshax.protocol import (
    BUILTIN_FORMATS,
    CacheAnswer,
    CachePruneAnswer,
    CachePruneRequest,
    ConfigAnswer,
    ConfigChangeAnswer,
    ConfigSetRequest,
    KernelsAnswer,
    LoadRequest,
    ModelInfo,
    ModelsAnswer,
    ModelState,
    SessionChange,
    SessionInfo,
    SessionsAnswer,
    StatusAnswer,
    TopologyAnswer,
    UnloadAnswer,
)

_INTERRUPTED = 130
_FORMATS = ", ".join(BUILTIN_FORMATS)


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Ask and tell syshaxd: its models, sessions, hardware and configuration.",
)
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show and change the configuration.")
app.add_typer(config_app, name="config")
sessions_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(sessions_app, name="sessions")
cache_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show and clear the packed cache.")
app.add_typer(cache_app, name="cache")
app.add_typer(workers.app, name="workers")


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"syshaxctl {version('syshax')}")
        except PackageNotFoundError:
            print("syshaxctl (not installed)")
        raise typer.Exit


@app.callback()
def global_options(
    context: typer.Context,
    runtime_dir: Annotated[
        Path | None,
        typer.Option(help="The daemon's directory [$SYSHAX_RUNTIME_DIR or /run/syshax].", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the protocol's message instead of a table.")] = False,
    api_socket: Annotated[
        Path | None,
        typer.Option(
            help="syshax-api's control socket [$SYSHAX_API_SOCKET or /run/syshax-api/control.sock].", show_default=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for one answer.", min=0.1)] = 30.0,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj = Context(Control(runtime_dir, timeout), Control.of_front(api_socket, timeout), json)


@app.command()
def status(context: typer.Context) -> None:
    """The daemon, its nodes, models and warnings on one screen."""
    ctl = context_of(context)
    ctl.show(ctl.control.get("/v1/status", StatusAnswer), screens.status)


@app.command()
def models(context: typer.Context) -> None:
    """Every model: configured, loading, ready, failed."""
    ctl = context_of(context)
    ctl.show(ctl.control.get("/v1/models", ModelsAnswer), screens.models)


@app.command()
def load(
    context: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(help="A checkpoint's directory. Left out: --name names a configured model.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What workers call it [the directory's name].", show_default=False)
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help=f"How experts are stored: {_FORMATS}, or one of `syshaxctl kernels` [the configured one].",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the load until it ends.")] = False,
) -> None:
    """Load a model's experts. Returns when the load has begun, with --wait when it has ended."""
    ctl = context_of(context)
    if path is None and name is None:
        raise InvalidArgumentError("neither PATH nor --name is given", "syshaxctl load PATH, or load --name NAME")
    chosen = name or values.default_name(path or Path())
    fields: dict[str, Any] = {"name": chosen, "path": str(path.absolute()) if path else None, "format": format}
    request = values.request(LoadRequest, **{key: value for key, value in fields.items() if value is not None})
    try:
        model = ctl.control.post("/v1/models", request, ModelInfo)
    except (CheckpointError, NotFoundError) as error:
        if path is not None and not path.exists() and "/" not in str(path):
            error.hint = f"a model named in the configuration is loaded with: syshaxctl load --name {path}"
        raise
    if wait:
        model = _follow(ctl, model)
    if ctl.json:
        ctl.show(model, lambda _: "")
    elif model.state is ModelState.READY:
        ctl.say(f"{model.name} is ready: {screens.model_note(model)}" if model.kernels else f"{model.name} is ready")
    else:
        ctl.say(f"{model.name} is {model.state.value}; follow it with: syshaxctl load --name {model.name} --wait")


def _follow(ctl: Context, model: ModelInfo) -> ModelInfo:
    try:
        return waiting.wait_until_ready(ctl.control, model, console_on(stderr=True))
    except KeyboardInterrupt:
        print(
            f"the load of {model.name} goes on in the daemon.\n"
            f"hint: follow it with `syshaxctl models`, end it with `syshaxctl unload {model.name}`",
            file=sys.stderr,
        )
        raise typer.Exit(_INTERRUPTED) from None


@app.command()
def unload(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The model.")],
    force: Annotated[bool, typer.Option("--force", help="Also when sessions use it: they end.")] = False,
) -> None:
    """Free a model's memory, or cancel its load."""
    ctl = context_of(context)
    where = f"/v1/models/{quote(name, safe='')}{'?force=1' if force else ''}"
    answer = ctl.control.delete(where, UnloadAnswer)
    assert answer is not None
    ctl.show(answer, lambda it: f"{it.name}: {it.state}")


@app.command()
def restart(
    context: typer.Context,
    drain: Annotated[bool, typer.Option("--drain", help="Let requests that are being computed finish first.")] = False,
) -> None:
    """Have the service manager start the daemon anew, and wait for it. Loaded models stay in memory."""
    ctl = context_of(context)
    ctl.show(waiting.restart(ctl.control, drain), screens.restarted)


@sessions_app.callback()
def sessions(context: typer.Context) -> None:
    """Show every attached worker, or change one."""
    if context.invoked_subcommand is None:
        ctl = context_of(context)
        ctl.show(ctl.control.get("/v1/sessions", SessionsAnswer), screens.sessions)


@sessions_app.command("set")
def sessions_set(
    context: typer.Context,
    session: Annotated[int, typer.Argument(metavar="ID", help="Its number in the list.", min=0)],
    priority: Annotated[
        str | None, typer.Option(help="Its class: interactive, normal or batch.", show_default=False)
    ] = None,
    share: Annotated[
        int | None,
        typer.Option(help="Percent of the data plane's time that it may take, 100: no limit.", show_default=False),
    ] = None,
) -> None:
    """Give a session another class or share, for as long as it lasts. Its own user may lower them only."""
    ctl = context_of(context)
    if priority is None and share is None:
        raise InvalidArgumentError(
            "neither --priority nor --share is given", "syshaxctl sessions set 3 --priority batch"
        )
    given = {"priority": priority, "share": share}
    change = values.request(SessionChange, **{key: value for key, value in given.items() if value is not None})
    ctl.show(ctl.control.patch(f"/v1/sessions/{session}", change, SessionInfo), screens.session_changed)


@sessions_app.command("kick")
def sessions_kick(
    context: typer.Context, session: Annotated[int, typer.Argument(metavar="ID", help="Its number in the list.", min=0)]
) -> None:
    """End a session for good: its requests end in an error, and its worker does not attach again by itself."""
    ctl = context_of(context)
    answer = ctl.control.delete(f"/v1/sessions/{session}", SessionsAnswer)
    assert answer is not None
    ctl.show(answer, lambda _: f"session {session} was ended")


@app.command()
def topology(context: typer.Context) -> None:
    """The machine's nodes and CPUs, and the plan made of them."""
    ctl = context_of(context)
    ctl.show(ctl.control.get("/v1/topology", TopologyAnswer), screens.topology)


@app.command()
def kernels(context: typer.Context) -> None:
    """Every kernel, whether this CPU can run it, and which are chosen."""
    ctl = context_of(context)
    ctl.show(ctl.control.get("/v1/kernels", KernelsAnswer), screens.kernels)


@app.command()
def doctor(context: typer.Context) -> None:
    """Look for what is wrong or slow, with or without a daemon. Exit status 1: warnings, 2: errors."""
    ctl = context_of(context)
    answer = examine(ctl.control)
    ctl.show(answer, screens.doctor)
    if status := exit_status(answer.checks):
        raise typer.Exit(status)


@cache_app.command("list")
def cache_list(context: typer.Context) -> None:
    """Packed models on the disk, those first that would go first."""
    ctl = context_of(context)
    ctl.show(ctl.control.get("/v1/cache", CacheAnswer), screens.cache)


@cache_app.command("prune")
def cache_prune(
    context: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(help="Only these entries (keys of cache list).")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every entry that is not in use.")] = False,
) -> None:
    """Remove entries that no load can use any more, or the named ones, or all. Never one in use."""
    ctl = context_of(context)
    if all and keys:
        raise InvalidArgumentError("keys and --all are both given", "syshaxctl cache prune KEY..., or --all")
    request = values.request(CachePruneRequest, keys=keys or [], all=all)
    ctl.show(ctl.control.post("/v1/cache/prune", request, CachePruneAnswer), screens.cache_pruned)


@config_app.command("show")
def config_show(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Only this key or table, such as limits.")] = "",
    origin: Annotated[
        bool, typer.Option("--origin", help="Where each value was set: file and line, variable, default.")
    ] = False,
) -> None:
    """The configuration in force and where each value comes from."""
    ctl = context_of(context)
    answer = ctl.control.get("/v1/config", ConfigAnswer)
    known = [dotted for dotted, _ in screens.flat(answer.effective)]
    if key and not any(dotted == key or dotted.startswith(f"{key}.") for dotted in known):
        raise NotFoundError(f"there is no key or table {key!r}", "syshaxctl config show lists every key")
    ctl.show(answer, lambda it: screens.config(it, key, origin))


@config_app.command("set")
def config_set(
    context: typer.Context,
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Values are TOML; bare words are text.")],
) -> None:
    """Change values now and after a restart; the administrator's file stays as it is. KEY= goes back to that file."""
    ctl = context_of(context)
    words = [f"{pairs[0]}={pairs[1]}"] if len(pairs) == 2 and "=" not in pairs[0] else pairs
    given = {key: None if value == "" else value for key, value in values.assignments(words).items()}
    answer = ctl.control.patch("/v1/config", ConfigSetRequest(values=given), ConfigChangeAnswer)
    ctl.show(answer, screens.config_change)


@config_app.command("reload")
def config_reload(context: typer.Context) -> None:
    """Read the configuration files again and apply what can be applied."""
    ctl = context_of(context)
    ctl.show(ctl.control.post("/v1/config/reload", None, ConfigChangeAnswer), screens.config_change)


def _globals_first(words: list[str]) -> list[str]:
    """Global options may stand anywhere: `syshaxctl status --json` is what people type."""
    front: list[str] = []
    rest: list[str] = []
    queue = iter(words)
    for word in queue:
        if word == "--":
            rest += [word, *queue]
        elif word == "--json" or word.startswith(("--runtime-dir=", "--api-socket=")):
            front.append(word)
        elif word in ("--runtime-dir", "--api-socket"):
            front += [word, *([value] if (value := next(queue, None)) is not None else [])]
        else:
            rest.append(word)
    return front + rest


def main() -> None:
    """Entry point: errors are lines on stderr and an exit status, never a traceback."""
    try:
        app(args=_globals_first(sys.argv[1:]), prog_name="syshaxctl")
    except SyshaxError as error:
        for line in error.message.splitlines() or [error.code]:
            print(f"error: {line}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
