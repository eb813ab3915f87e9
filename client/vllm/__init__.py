"""The vLLM plugin: routed experts computed by syshaxd, everything else by vLLM as it is.

Read in this order: config (vLLM asks for a method for each layer), method (checks the layer, holds no weights), op
(what the compiled graph sees), attachment (this process's session with the daemon), staging (accelerators). loader
keeps expert tensors from being read; launcher is the command syshax-worker. Only vLLM's own registries are used,
nothing is patched.
"""

from __future__ import annotations

QUANTIZATION = "syshax"
"""What --quantization and --load-format are called."""


def register() -> None:
    """The entry point: vLLM calls it once in every process of a server (front end, engine core, workers) and perhaps
    again. Adds the quantization method, the load format and the op to vLLM's and torch's registries."""
    from syshax.vllm import config, loader

    config.register()
    loader.register()
