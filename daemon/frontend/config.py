"""Every option of syshax-api, one row each: the check, etc/syshax-api.toml and docs/API.md come from here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field

from syshax.errors import ConfigError
from syshaxd.settings import Layer, Settings, build, read_toml, with_drop_ins

DEFAULT_FILE = Path("/etc/syshax/syshax-api.toml")
EXAMPLE_HEADING = """syshax-api: the OpenAI HTTP API in front of vLLM workers.
Every key is shown with its default; uncomment what you change. Files in syshax-api.toml.d/*.toml win over this one,
and the command line wins over both. An unknown key is an error. Sizes may be written "64 MiB"."""


def check_worker(url: str) -> str:
    """`url` if it names a worker: http://HOST:PORT, https://HOST:PORT or unix:PATH. ValueError says what is wrong."""
    if url.startswith("unix:"):
        if not url.removeprefix("unix:").startswith("/"):
            raise ValueError("unix: needs an absolute path, as in unix:/run/syshax/worker.sock")
        return url
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a worker is http://HOST:PORT or unix:PATH")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ValueError("a worker's URL ends after the port: no path (not even /v1), query, fragment or user")
    _ = parts.port
    return url.rstrip("/")


def _distinct(urls: list[str]) -> list[str]:
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"worker {twice} is named twice")
    return urls


WorkerUrl = Annotated[str, AfterValidator(check_worker)]
Seconds = Annotated[float, Field(gt=0, le=86400 * 7)]


class Limits(Settings):
    body: Annotated[ByteSize, Field(ge=1024)] = Field(
        default=ByteSize(64 << 20), description="Largest request body; a larger one gets 413."
    )
    header: Annotated[ByteSize, Field(ge=1024)] = Field(
        default=ByteSize(64 << 10), description="Largest request line and largest single header line."
    )
    headers: int = Field(default=128, ge=16, le=10000, description="Most header lines of one request.")
    requests: int = Field(
        default=4096,
        ge=1,
        description="Most requests passed on at once; one more gets 429 with Retry-After. Streams count while open.",
    )


class Timeouts(Settings):
    connect_seconds: Seconds = Field(default=5.0, description="To connect to a worker.")
    first_byte_seconds: Seconds = Field(
        default=3600.0,
        description="From a request's arrival until a worker begins to answer (a whole generation when it does not "
        "stream).",
    )
    idle_seconds: Seconds = Field(default=600.0, description="Between two chunks of an answer.")
    hold_seconds: float = Field(
        default=2.0,
        ge=0,
        le=3600,
        description="How long an answer's headers wait for its first chunk: a worker that fails in this time is\n"
        "replaced by another one and the client sees nothing of it. 0: headers pass at once.",
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, le=86400, description="After SIGTERM, to finish what runs; what is left then is ended."
    )
    keepalive_seconds: Seconds = Field(default=75.0, description="An idle client connection is closed after this.")


class Health(Settings):
    interval_seconds: Annotated[float, Field(ge=0.05, le=3600)] = Field(
        default=2.0, description="Between two checks of a ready worker."
    )
    retry_seconds: Annotated[float, Field(ge=0.05, le=3600)] = Field(
        default=0.5, description="Between two checks of a worker that is not ready."
    )
    timeout_seconds: Seconds = Field(
        default=10.0, description="A check without an answer in this time failed; two in a row: not ready."
    )


class Logging(Settings):
    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level written.")
    format: Literal["text", "json"] = Field(default="text", description="Lines for people or objects for collectors.")
    requests: bool = Field(default=True, description="One line for every request (at level info).")


class ApiConfig(Settings):
    """The whole configuration of syshax-api."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on. Use a TLS reverse proxy for others."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0: any free one, named in the log.")
    workers: Annotated[list[WorkerUrl], AfterValidator(_distinct)] = Field(
        default=[],
        description="vLLM workers: http://HOST:PORT or unix:PATH (HTTP over a Unix socket). At least one.",
    )
    api_keys_file: str = Field(
        default="",
        description="One API key a line, # begins a comment; SIGHUP reads it again. When set, every route but\n"
        "/health and /ready asks for `Authorization: Bearer KEY`.",
    )
    limits: Limits = Field(default=Limits(), description="What one client may ask for.")
    timeouts: Timeouts = Field(default=Timeouts(), description="All in seconds.")
    health: Health = Field(default=Health(), description="How workers are checked.")
    logging: Logging = Field(default=Logging(), description="To standard error.")


def load_config(file: Path | None, overrides: dict[str, Any]) -> ApiConfig:
    """File (the default one may be absent), its drop-ins, then the command line. Raises `ConfigError`."""
    files: Sequence[Path] = with_drop_ins(DEFAULT_FILE) if file is None else [file, *with_drop_ins(file)[1:]]
    layers = [read_toml(path) for path in files]
    config, _ = build(ApiConfig, [*layers, Layer("command line", overrides)])
    if not config.workers:
        raise ConfigError(
            "no worker to pass requests to",
            f'--worker http://HOST:PORT or --worker unix:PATH, or `workers = ["…"]` in {file or DEFAULT_FILE}',
        )
    return config
