"""The vLLM command line of a worker: what syshax-worker adds to the user's options, whose choices win.

Pure functions over a few facts about the machine, so that tests see every decision. Must not import vllm.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syshax.errors import ConfigError
from syshax.vllm import QUANTIZATION
from syshax.vllm.cpus import CpuPlan

MIB = 1 << 20
KV_SEQUENCES = 8
"""The default KV cache holds this many sequences of full length ..."""
KV_MEMORY_SHARE = 4
"""... but takes no more than this part of the available memory."""


@dataclass
class Command:
    """What to run; `notes` are for the user."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Facts:
    """What the choice depends on beside the options."""

    config: Mapping[str, Any]
    """The checkpoint's config.json."""
    has_serve: bool
    """`vllm serve` can start (the CPU build of this version cannot: its distribution is not called vllm)."""
    cpu_platform: bool
    available_bytes: int
    cpus: CpuPlan | None = None
    splitting_ops: tuple[str, ...] = ()
    """Where a compiled graph is cut on a device with graphs; () on the CPU platform."""


class Options:
    """The user's vLLM options, asked by name. `--a-b x`, `--a-b=x` and `--a_b x` are the same to vLLM."""

    def __init__(self, words: Sequence[str], from_file: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, str] = {}
        for key, value in (from_file or {}).items():
            self._values[f"--{key}".replace("_", "-")] = str(value)
        for word, following in itertools.pairwise([*words, "--"]):
            if word.startswith("-"):
                name, equals, value = word.partition("=")
                self._values[name.replace("_", "-")] = value if equals else ("" if following[:1] == "-" else following)

    def has(self, *names: str) -> bool:
        return any(name in self._values for name in names)

    def get(self, *names: str) -> str | None:
        return next((self._values[name] for name in names if name in self._values), None)

    def number(self, *names: str, default: int) -> int:
        """Suffixes (4k) and words (auto) are vLLM's own matter: the default stands in for them here."""
        value = self.get(*names)
        return int(value) if value is not None and value.isdecimal() else default


def worker_command(model: str, words: Sequence[str], facts: Facts, environment: Mapping[str, str]) -> Command:
    """The full command for `syshax-worker MODEL words...`. Raises ConfigError for options that contradict syshax."""
    options = Options(words, _config_file(Options(words).get("--config")))
    for names in (("--quantization", "-q"), ("--load-format",)):
        chosen = options.get(*names)
        if chosen not in (None, QUANTIZATION):
            raise ConfigError(
                f"{names[0]} {chosen}: with it vLLM would compute the experts itself",
                "leave the option out, or run `vllm serve` for a server without syshaxd",
            )
    command = Command(_program(model, facts))
    defaults = {"--quantization": ("-q",), "--load-format": ()}
    for name, short in defaults.items():
        if not options.has(name, *short):
            command.argv += [name, QUANTIZATION]
    if Path(model).is_dir():
        _set(command, environment, "HF_HUB_OFFLINE", "1")
        if not options.has("--served-model-name"):
            command.argv += ["--served-model-name", Path(model).resolve().name]
    if facts.cpu_platform:
        _cpu_platform(command, options, facts, environment)
    elif facts.splitting_ops and not options.has("--compilation-config", "-cc", "-O", "--enforce-eager"):
        graphs = {"cudagraph_mode": "PIECEWISE", "splitting_ops": list(facts.splitting_ops)}
        command.argv += ["--compilation-config", json.dumps(graphs)]
        command.notes.append("device graphs are cut around the experts (piecewise); this path has not been run by us")
    command.argv += words
    return command


def worker_address(words: Sequence[str]) -> str:
    """Where vLLM will answer with these options: unix:PATH or http://HOST:PORT (0.0.0.0: on every address)."""
    options = Options(words, _config_file(Options(words).get("--config")))
    if path := options.get("--uds"):
        return f"unix:{Path(path).absolute()}"
    host = options.get("--host") or "0.0.0.0"  # vLLM's own default
    return f"http://{f'[{host}]' if ':' in host else host}:{options.number('--port', default=8000)}"


def _program(model: str, facts: Facts) -> list[str]:
    if facts.has_serve:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _config_file(path: str | None) -> Mapping[str, Any] | None:
    """vLLM's own --config FILE: options there are the user's as well."""
    if not path:
        return None
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    return content if isinstance(content, dict) else None


def _set(command: Command, environment: Mapping[str, str], name: str, value: str) -> None:
    if name not in environment:
        command.environment[name] = value


def _cpu_platform(command: Command, options: Options, facts: Facts, environment: Mapping[str, str]) -> None:
    if not options.has("--kv-cache-memory-bytes") and not environment.get("VLLM_CPU_KVCACHE_SPACE"):
        size, whole = kv_cache_bytes(facts.config, options, facts.available_bytes)
        command.argv += ["--kv-cache-memory-bytes", str(size)]
        if not whole and not options.has("--max-model-len"):
            command.argv += ["--max-model-len", "-1"]
            command.notes.append(
                f"the KV cache gets {size // MIB} MiB, which does not hold a sequence of the model's full length: "
                "vLLM shortens it to what fits (--max-model-len, --kv-cache-memory-bytes)"
            )
    if facts.cpus is None:
        return
    _set(command, environment, "VLLM_CPU_OMP_THREADS_BIND", facts.cpus.binding)
    if facts.cpus.shared:
        _set(command, environment, "OMP_WAIT_POLICY", "PASSIVE")
        command.notes.append(
            "syshaxd's threads use every CPU that this worker may use: they share them, in turns "
            "(give syshaxd fewer threads to keep them apart)"
        )


def kv_cache_bytes(config: Mapping[str, Any], options: Options, available_bytes: int) -> tuple[int, bool]:
    """Bytes of the KV cache and whether a sequence of full length fits.

    Eight such sequences, at least 64 MiB, at most a quarter of the available memory; vLLM's own default is most of
    the machine, which is where the experts live.
    """
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    values = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_dim
    element = 4 if options.get("--dtype") in ("float", "float32") else 2
    length = options.number("--max-model-len", default=int(config.get("max_position_embeddings", 4096)))
    sequence = values * element * length
    size = max(64 * MIB, min(KV_SEQUENCES * sequence, available_bytes // KV_MEMORY_SHARE))
    size -= size % MIB
    return size, size >= sequence
