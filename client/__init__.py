"""syshax: attach to syshaxd and have the routed experts of a model computed by this machine's CPUs.

from syshax import Client
with Client() as client:
    model = client.open("qwen3")
    y = model.moe(layer, hidden_states, topk_ids, topk_weights)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syshax.errors import (
    CheckpointError,
    DaemonAbsentError,
    DaemonLostError,
    FingerprintError,
    InvalidArgumentError,
    LimitError,
    ModelNotReadyError,
    NoMemoryError,
    NotAllowedError,
    RequestTimeoutError,
    SessionEndedError,
    ShuttingDownError,
    SyshaxError,
    UnknownModelError,
    VersionError,
)

if TYPE_CHECKING:
    from syshax.client import Client, Model, Pending

__all__ = [
    "CheckpointError",
    "Client",
    "DaemonAbsentError",
    "DaemonLostError",
    "FingerprintError",
    "InvalidArgumentError",
    "LimitError",
    "Model",
    "ModelNotReadyError",
    "NoMemoryError",
    "NotAllowedError",
    "Pending",
    "RequestTimeoutError",
    "SessionEndedError",
    "ShuttingDownError",
    "SyshaxError",
    "UnknownModelError",
    "VersionError",
]


def __getattr__(name: str) -> Any:
    """Client, Model and Pending when they are first asked for: the daemon and syshaxctl start without numpy."""
    if name in ("Client", "Model", "Pending"):
        from syshax import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
