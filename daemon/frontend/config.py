"""Every option of syshax-api, one row each: the check, etc/syshax-api.toml and docs/API.md come from here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field

from syshax.errors import ConfigError
from syshaxd.settings import Layer, Settings, build, read_toml, with_drop_ins

DEFAULT_FILE = Path("/etc/syshax/syshax-api.toml")
CREDENTIAL = "syshax-api.keys"
"""systemd's credential that is the keys file where keys_file is not set."""
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


def _one_step(aliases: dict[str, str]) -> dict[str, str]:
    for alias, model in aliases.items():
        if not alias or not model:
            raise ValueError("an alias and its model are names of at least one character")
        if model in aliases:
            raise ValueError(f"`{alias}` stands for `{model}`, which is an alias itself; name the model")
    return aliases


WorkerUrl = Annotated[str, AfterValidator(check_worker)]
WorkerUrls = Annotated[list[WorkerUrl], AfterValidator(_distinct)]
Seconds = Annotated[float, Field(gt=0, le=86400 * 7)]
Priority = Literal["interactive", "normal", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The highest first; everywhere else a priority is its index here."""
DEFAULT_GROUP = "default"
"""The name of the group that `workers` is short for."""


class Group(Settings):
    """Workers that are alike: any of them may answer a request for a model that they serve."""

    workers: WorkerUrls = Field(default=[], description="As `workers` above.", examples=[["http://127.0.0.1:8001"]])
    priority: Priority = Field(
        default="normal",
        description="interactive, normal or batch: requests of keys with this priority go here; those without a key\n"
        "are normal. Where no group of theirs has a ready worker that serves the model, they go to the nearest one.",
    )
    vllm_priority: bool = Field(
        default=False,
        description="The workers run with --scheduling-policy priority: a key's priority is put into the body's "
        "`priority` (interactive 0, normal 10, batch 20; vLLM serves lower ones first).",
    )
    requests_per_worker: int = Field(default=0, ge=0, description="As in [queue], for this group; 0: the same.")
    key_file: str = Field(
        default="",
        description="File that holds the API key of these workers (vLLM's --api-key): it is sent instead of the "
        "client's Authorization. Read at the start.",
    )

    def authorization(self) -> str:
        """The header's value for its workers; "" without one. `ConfigError` where the file holds no key."""
        if not self.key_file:
            return ""
        try:
            key = Path(self.key_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"key_file {self.key_file}: {(error.strerror or str(error)).lower()}",
                "it must be readable by the user of syshax-api",
            ) from None
        except UnicodeDecodeError:
            key = ""
        if not key.isascii() or not key.isprintable() or len(key.split()) != 1:
            raise ConfigError(
                f"key_file {self.key_file}: is not one word of ASCII", "it holds the key and nothing else"
            )
        return f"Bearer {key}"


class Affinity(Settings):
    enabled: bool = Field(
        default=True,
        description="Requests that begin alike go to the same worker of their group, whose cache holds their prefix.",
    )
    load_factor: float = Field(
        default=1.5,
        ge=1,
        le=100,
        description="But never to a worker that would then have more than this times the mean of requests in progress.",
    )
    prompt_bytes: int = Field(
        default=256,
        ge=16,
        le=65536,
        description="How much of a completion's prompt says where it goes. In a chat it is the messages up to the "
        "first one of the user.",
    )


class Queue(Settings):
    requests_per_worker: int = Field(
        default=2048,
        ge=1,
        description="Most requests that a worker has in progress; further ones wait here, by priority. vLLM holds a "
        "queue of its own beyond its --max-num-seqs: a limit near that lets priorities and cancelling work here.",
    )
    length: int = Field(
        default=1024,
        ge=0,
        description="Most requests that wait, per model and priority; one more gets 429. 0: none wait.",
    )
    wait_seconds: Seconds = Field(default=30.0, description="A request that waited this long gets 429.")


class Daemon(Settings):
    view_socket: str = Field(
        default="/run/syshax-view/view.sock",
        description="Where syshaxd shows its state, for readiness and the console. A worker whose daemon cannot be "
        'asked counts by its own answers. "": ask nobody.',
    )
    wait_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="A worker whose experts are away is not ready. Where no other serves the model, requests go to it "
        "all the same for so long, and wait there for the daemon to come back; then they are refused. 0: at once.",
    )


class Limits(Settings):
    body: Annotated[ByteSize, Field(ge=1024)] = Field(
        default=ByteSize(64 << 20), description="Largest request body; a larger one gets 413."
    )
    bodies: Annotated[ByteSize, Field(ge=1024)] = Field(
        default=ByteSize(1 << 30),
        description="Memory for the bodies of requests that have no answer yet, over all processes; one more body gets "
        "429. Those of up to 64 KiB are not counted.",
    )
    header: Annotated[ByteSize, Field(ge=1024)] = Field(
        default=ByteSize(64 << 10), description="Largest request line and largest single header line."
    )
    headers: int = Field(default=128, ge=16, le=10000, description="Most header lines of one request.")
    requests: int = Field(
        default=4096,
        ge=1,
        description="Most requests passed on or waiting at once, over all processes; one more gets 429 with "
        "Retry-After. Streams count while open.",
    )
    connections: int = Field(
        default=16384, ge=1, description="Most connections of clients at once, over all processes; one more is closed."
    )
    connections_per_address: int = Field(
        default=0,
        ge=0,
        description="The same from one IP address. 0: no such limit; behind a reverse proxy all have its address.",
    )


class Timeouts(Settings):
    connect_seconds: Seconds = Field(default=5.0, description="To connect to a worker.")
    first_byte_seconds: Seconds = Field(
        default=3600.0,
        description="From a request's arrival until a worker begins to answer (a whole generation when it does not "
        "stream).",
    )
    header_seconds: Seconds = Field(
        default=30.0, description="From a request's first byte until its head (line and headers) is complete."
    )
    body_seconds: Seconds = Field(default=300.0, description="From a request's head until its body is complete.")
    idle_seconds: Seconds = Field(
        default=600.0, description="Between two chunks of an answer; also how long a client may read nothing of it."
    )
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


class Tracing(Settings):
    make: bool = Field(
        default=False,
        description="Give requests without a W3C trace context one of their own. Those that have one keep it either "
        "way, and the log line names it.",
    )


class Control(Settings):
    socket: str = Field(
        default="",
        description="Unix socket for `syshaxctl workers`. Empty: control.sock in the directory that systemd makes for "
        "the unit (RuntimeDirectory=), else none.",
    )
    admin_group: str = Field(
        default="syshax-admin", description="Its members may use it, beside root and the user of syshax-api."
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
    processes: int = Field(default=1, ge=1, le=256, description="Processes that share the port, one core each.")
    workers: WorkerUrls = Field(
        default=[],
        description="vLLM workers: http://HOST:PORT or unix:PATH (HTTP over a Unix socket). Short for a group named "
        "`default`. At least one worker, here or in a group.",
    )
    keys_file: str = Field(
        default="",
        description="API keys, as `syshax-api new-key` writes them; SIGHUP reads it again. With keys every route but "
        "/health and /ready asks for `Authorization: Bearer KEY`. Empty: systemd's credential syshax-api.keys if it "
        "passes one, else no keys.",
    )
    groups: dict[str, Group] = Field(default={}, description="Further workers, by group; a NAME is free.")
    aliases: Annotated[dict[str, str], AfterValidator(_one_step)] = Field(
        default={},
        description="Further names of models: a request for the name on the left is one for the model on the right.",
        examples=[{"gpt-4o": "qwen3"}],
    )
    affinity: Affinity = Field(default=Affinity(), description="Which of several workers answers.")
    queue: Queue = Field(default=Queue(), description="When workers have enough to do.")
    limits: Limits = Field(default=Limits(), description="What one client may ask for.")
    timeouts: Timeouts = Field(default=Timeouts(), description="All in seconds.")
    health: Health = Field(default=Health(), description="How workers are checked.")
    daemon: Daemon = Field(default=Daemon(), description="The daemon that holds the workers' experts, on this host.")
    tracing: Tracing = Field(default=Tracing(), description="Trace context, for workers that export spans.")
    control: Control = Field(default=Control(), description="Who changes workers while it runs.")
    logging: Logging = Field(default=Logging(), description="To standard error.")

    def worker_groups(self) -> dict[str, Group]:
        """Every group by name, `workers` as the group `default`; those without workers too."""
        return {**({DEFAULT_GROUP: Group(workers=self.workers)} if self.workers else {}), **self.groups}


def load_config(file: Path | None, overrides: dict[str, Any]) -> ApiConfig:
    """File (the default one may be absent), its drop-ins, then the command line. Raises `ConfigError`."""
    files: Sequence[Path] = with_drop_ins(DEFAULT_FILE) if file is None else [file, *with_drop_ins(file)[1:]]
    layers = [read_toml(path) for path in files]
    config, sources = build(ApiConfig, [*layers, Layer("command line", overrides)])
    _check_groups(config, sources)
    passed = Path(os.environ.get("CREDENTIALS_DIRECTORY", "")) / CREDENTIAL
    if not config.keys_file and passed.is_absolute() and passed.exists():
        config = config.model_copy(update={"keys_file": str(passed)})
    if not any(group.workers for group in config.worker_groups().values()):
        raise ConfigError(
            "no worker to pass requests to",
            f'--worker http://HOST:PORT or --worker unix:PATH, or `workers = ["…"]` in {file or DEFAULT_FILE}',
        )
    return config


def _check_groups(config: ApiConfig, sources: Mapping[str, str]) -> None:
    if config.workers and DEFAULT_GROUP in config.groups:
        source = next(source for key, source in sources.items() if key.startswith(f"groups.{DEFAULT_GROUP}"))
        raise ConfigError(
            f"{source}: groups.{DEFAULT_GROUP}: `workers` makes a group of this name already",
            f"move its workers into [groups.{DEFAULT_GROUP}], or choose another name",
        )
    seen = dict.fromkeys(config.workers, "workers")
    for name, group in config.groups.items():
        group.authorization()
        for url in group.workers:
            if url in seen:
                source = sources.get(f"groups.{name}.workers", "configuration")
                raise ConfigError(
                    f"{source}: groups.{name}.workers: worker {url} is in {seen[url]} already",
                    "a worker belongs to one group",
                )
            seen[url] = f"groups.{name}.workers"
