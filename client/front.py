"""Messages of syshax-api's control socket, for it and for `syshaxctl workers`: one pydantic model each."""

from __future__ import annotations

from pydantic import Field

from syshax.protocol import Answer, Request

FRONT_SOCKET = "/run/syshax-api/control.sock"
FRONT_SOCKET_VARIABLE = "SYSHAX_API_SOCKET"
FRONT_ROUTES: dict[str, str] = {
    "GET /v1/workers": "WorkersAnswer",
    "POST /v1/workers": "WorkerAddRequest -> WorkerChangeAnswer",
    "PATCH /v1/workers/{url}": "WorkerDrainRequest -> WorkerChangeAnswer",
    "DELETE /v1/workers/{url}": "WorkerChangeAnswer: it finishes what it has, then it is gone",
}
"""Every route; a worker's URL is percent-encoded in the path."""


class WorkerInfo(Answer):
    """A vLLM worker behind the front-end; figures are those of all its processes since it began."""

    url: str
    group: str
    state: str
    """ready, not ready, partly ready (not in every process), draining (finishes what it has), leaving (then it is
    gone)."""
    reason: str = ""
    experts: str = "not known"
    models: list[str] = Field(default_factory=list)
    outstanding: int = 0
    requests: int = 0
    ttft_ms_p50: float | None = None
    ttft_ms_p99: float | None = None
    configured: bool = True
    """The configuration names it; otherwise it was added and lasts until the next restart."""


class WorkersAnswer(Answer):
    boot_id: str
    processes: int
    """That answered."""
    workers: list[WorkerInfo]


class WorkerAddRequest(Request):
    url: str = Field(max_length=1000)
    group: str | None = Field(default=None, max_length=200)


class WorkerDrainRequest(Request):
    draining: bool


class WorkerChangeAnswer(Answer):
    boot_id: str
    url: str
    group: str
    message: str
    permanent: str
    """What in the configuration makes it last; a change here ends with the process."""
