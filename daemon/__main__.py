"""The command line of syshaxd. Starts the daemon, or checks its configuration, measures (`syshaxd bench`), or
looks at an operator library (`syshaxd operators`).

Exit codes:
  0    stopped in order, or the configuration is good
  1    an internal fault
  2    configuration, arguments or hardware do not allow a start
  3    another syshaxd, or another program, has the runtime directory
  4    stopped, but requests that were accepted could not be finished within limits.drain_seconds
  75   stopped because a restart was asked for: the service manager is to start the next one
  130  a second signal cut the stop short
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.main
from typer.core import TyperGroup

from syshax.errors import SyshaxError
from syshax.protocol import DEFAULT_RUNTIME_DIR, Origin, StartOption
from syshaxd.config_files import DEFAULT_CONFIG, ConfigFiles
from syshaxd.core import compiled_core
from syshaxd.server import Options, Server, check_start
from syshaxd.status import version

DEFAULT_STATE_DIR = "/var/lib/syshax"
DEFAULT_CACHE_DIR = "/var/cache/syshax"
_COMMANDS = {"bench": "syshaxd.bench.app", "operators": "syshaxd.operators.app"}


class _Commands(TyperGroup):
    """Imports a command's module when it is called or listed: the daemon starts without them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(importlib.import_module(_COMMANDS[cmd_name]).app)
        command.name = cmd_name
        return command


app = typer.Typer(cls=_Commands, add_completion=False, no_args_is_help=False, rich_markup_mode=None)


def default_runtime_dir(user: bool) -> Path:
    """/run/syshax; for a user's own daemon $XDG_RUNTIME_DIR/syshax, or /tmp/syshax-UID."""
    if not user:
        return Path(DEFAULT_RUNTIME_DIR)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "syshax" if base else Path(f"/tmp/syshax-{os.geteuid()}")


def default_folder(kind: str, system: str, home: str, user: bool) -> Path:
    """What systemd gives ($STATE_DIRECTORY for the kind "STATE"), else `system`; for a user's own daemon under
    $XDG_STATE_HOME, which is `home` in the home directory where it is not set."""
    given = os.environ.get(f"{kind}_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if not user:
        return Path(system)
    base = os.environ.get(f"XDG_{kind}_HOME")
    return (Path(base) if base else Path.home() / home) / "syshax"


def options_from(config: Path | None, runtime_dir: Path | None, state_dir: Path | None, user: bool) -> Options:
    main = config or DEFAULT_CONFIG
    state = state_dir or default_folder("STATE", DEFAULT_STATE_DIR, ".local/state", user)
    runtime = (runtime_dir or default_runtime_dir(user)).absolute()
    start = (
        _start_option("--config", main, config is not None, None),
        _start_option("--runtime-dir", runtime, runtime_dir is not None, "SYSHAX_RUNTIME_DIR"),
        _start_option("--state-dir", state, state_dir is not None, "STATE_DIRECTORY"),
    )
    files = ConfigFiles(main, config is not None, state)
    cache = default_folder("CACHE", DEFAULT_CACHE_DIR, ".cache", user)
    return Options(files, runtime, user, cache, start)


def _start_option(name: str, value: Path, given: bool, variable: str | None) -> StartOption:
    """`given`: on the command line, or by the variable of the same value."""
    if variable and os.environ.get(variable) and Path(os.environ[variable].split(":")[0]).absolute() == value:
        return StartOption(name=name, value=str(value), origin=Origin(kind="environment", where=variable))
    kind: Literal["command line", "default"] = "command line" if given else "default"
    return StartOption(name=name, value=str(value), origin=Origin(kind=kind))


def fail(error: SyshaxError) -> int:
    """Says what is wrong on standard error. The exit code."""
    print(f"syshaxd: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


async def serve(options: Options) -> int:
    return await Server(compiled_core(), options).run()


@app.callback(invoke_without_command=True)
def syshaxd(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration file; F.d/*.toml beside it are read too.")] = None,
    runtime_dir: Annotated[
        Path | None, typer.Option(envvar="SYSHAX_RUNTIME_DIR", help="Directory of control.sock and attach.sock.")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where `config set` keeps its changes.")] = None,
    user: Annotated[
        bool, typer.Option("--user", help="A daemon of your own: private directory, you are its administrator.")
    ] = False,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Check configuration and hardware plan, start nothing.")
    ] = False,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Computes the routed experts of Mixture-of-Experts models for workers that attach."""
    if context.invoked_subcommand is not None:
        return
    if show_version:
        print(f"syshaxd {version()}")
        return
    options = options_from(config, runtime_dir, state_dir, user)
    try:
        if check_config:
            plan, libraries = check_start(compiled_core(), options.files.load().config)
            for library in libraries:
                if not library.loaded:
                    print(f"warning: operator library {library.path} is refused: {library.reason}", file=sys.stderr)
            print(f"ok: {plan.threads} threads on {len(plan.nodes)} nodes")
            return
        code = asyncio.run(serve(options))
    except SyshaxError as error:
        code = fail(error)
    except Exception:
        logging.getLogger("syshaxd").exception("syshaxd failed")
        code = 1
    raise typer.Exit(code)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
