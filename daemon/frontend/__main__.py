"""The command line of syshax-api."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from syshax.errors import SyshaxError
from syshaxd.config import LoggingConfig
from syshaxd.frontend.config import DEFAULT_FILE, load_config
from syshaxd.frontend.process import run
from syshaxd.logs import set_up_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def serve(
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
    given: dict[str, Any] = {"host": host, "port": port, "workers": worker or None}
    given["keys_file"] = str(keys_file) if keys_file else None
    settings = load_config(config, {key: value for key, value in given.items() if value is not None})
    if check_config:
        typer.echo("configuration is valid")
        return
    set_up_logging(LoggingConfig(level=settings.logging.level, format=settings.logging.format), "syshax-api")
    raise typer.Exit(run(settings))


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
