"""syshax: attach to syshaxd and have the routed experts of a model computed by this machine's CPUs.

from syshax import Client
with Client() as client:
    model = client.open("qwen3")
    y = model.moe(layer, hidden_states, topk_ids, topk_weights)
"""

from syshax.client import Client, Model, Pending
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
    ShuttingDownError,
    SyshaxError,
    UnknownModelError,
    VersionError,
)

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
    "ShuttingDownError",
    "SyshaxError",
    "UnknownModelError",
    "VersionError",
]
