"""The vLLM plugin. vLLM calls `register` once in every process of a server: front end, engine core, workers."""

from __future__ import annotations


def register() -> None:
    """Adds syshax to vLLM's registries."""
