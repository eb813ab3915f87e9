"""The control API's routes and what each answers, for the daemon, tools and documentation alike."""

from __future__ import annotations

ROUTES: dict[str, str] = {
    "GET /v1/status": "StatusAnswer",
    "GET /v1/models": "ModelsAnswer",
    "GET /v1/models/{name}": "ModelInfo",
    "GET /v1/models/{name}/experts": "ExpertsAnswer",
    "POST /v1/models": "LoadRequest -> ModelInfo (202)",
    "DELETE /v1/models/{name}": "UnloadAnswer; ?force=1 ends its sessions, also cancels a load",
    "POST /v1/restart": "RestartRequest -> RestartAnswer (202)",
    "GET /v1/sessions": "SessionsAnswer",
    "PATCH /v1/sessions/{session_id}": "SessionChange -> SessionInfo",
    "DELETE /v1/sessions/{session_id}": "ends one session",
    "GET /v1/topology": "TopologyAnswer",
    "GET /v1/kernels": "KernelsAnswer",
    "GET /v1/config": "ConfigAnswer",
    "PATCH /v1/config": "ConfigSetRequest -> ConfigChangeAnswer",
    "POST /v1/config/reload": "ConfigChangeAnswer",
    "GET /v1/cache": "CacheAnswer",
    "POST /v1/cache/prune": "CachePruneRequest -> CachePruneAnswer",
    "GET /v1/doctor": "DoctorAnswer",
    "GET /metrics": "Prometheus text",
}
"""Every route; docs/CONTROL.md and a test list them. Every answer has the header X-Syshax-Boot-Id."""
VIEW_ROUTES = tuple(
    f"GET /v1/{path}" for path in ("status", "models", "models/{name}", "models/{name}/experts", "sessions")
)
"""Those of the view socket, which changes nothing whoever connects."""
