"""The command line of syshax-api."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from syshax.errors import SyshaxError
from syshaxd.config import LoggingConfig
from syshaxd.frontend.config import DEFAULT_FILE, PRIORITIES, load_config
from syshaxd.frontend.keys import new_key
from syshaxd.frontend.process import Process, run_loop
from syshaxd.frontend.supervisor import Supervisor
from syshaxd.logs import set_up_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class _Priority(Enum):
    INTERACTIVE, NORMAL, BATCH = PRIORITIES


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help=f"Configuration file instead of {DEFAULT_FILE}.", show_default=False)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="TCP port [8000]; 0: any.", show_default=False)] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(help="A vLLM worker: http://HOST:PORT or unix:PATH. May be repeated.", show_default=False),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(help="File of API keys; then every route but health asks for one.", show_default=False),
    ] = None,
    check_config: Annotated[bool, typer.Option("--check-config", help="Check the configuration and leave.")] = False,
) -> None:
    """The OpenAI HTTP API in front of vLLM workers. Options win over the configuration file."""
    if context.invoked_subcommand is not None:
        return
    given: dict[str, Any] = {"host": host, "port": port, "workers": worker or None}
    given["keys_file"] = str(keys_file) if keys_file else None
    settings = load_config(config, {key: value for key, value in given.items() if value is not None})
    if check_config:
        typer.echo("configuration is valid")
        return
    set_up_logging(LoggingConfig(level=settings.logging.level, format=settings.logging.format), "syshax-api")

    async def run() -> int:
        return await (Process(settings) if settings.processes == 1 else Supervisor(settings)).run()

    raise typer.Exit(run_loop(run))


@app.command("new-key")
def make_key(
    name: Annotated[str, typer.Argument(help="Letters, digits, - and _; whose key it is.")],
    models: Annotated[
        list[str] | None, typer.Option("--model", help="May use this model only; may be repeated.", show_default=False)
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most requests in any minute.", show_default=False)
    ] = None,
    priority: Annotated[
        _Priority, typer.Option(help="Who waits for whom, and which group of workers answers.")
    ] = _Priority.NORMAL,
) -> None:
    """Makes an API key and prints it, this once, and the lines to append to keys_file, which hold only its hash."""
    key, lines = new_key(name, models=models or None, requests_per_minute=requests_per_minute, priority=priority.value)
    typer.echo(f"# The key, for its holder; it is shown only now: {key}", err=True)
    typer.echo("# For keys_file; then `systemctl reload syshax-api`:", err=True)
    typer.echo(lines, nl=False)


def main() -> None:
    """Entry point: an error of the user's is one line and a hint, never a traceback."""
    try:
        app()
    except SyshaxError as error:
        for line in error.message.splitlines():
            print(f"error: {line}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
