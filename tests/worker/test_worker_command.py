"""What syshax-worker adds to a vLLM command line: everything that is missing, nothing that the user chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syshax.errors import ConfigError
from syshax.protocol import AcceleratorMode
from syshax.vllm.command import MIB, Facts, Options, kv_cache_bytes, worker_address, worker_command
from syshax.vllm.cpus import CpuPlan
from syshax.vllm.launcher import check_platform, split_words

CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}
GIB = 1 << 30


def facts(**changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "config": CONFIG,
        "has_serve": False,
        "cpu_platform": True,
        "available_bytes": 8 * GIB,
        "cpus": CpuPlan(((0,),), (0, 1), False),
    }
    return Facts(**(fields | changes))


def option(argv: list[str], name: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == name]


def test_a_directory_on_the_cpu_platform(tmp_path: Path) -> None:
    model = tmp_path / "Qwen3-30B-A3B"
    model.mkdir()
    command = worker_command(str(model), ["--port", "8001"], facts(), {})
    assert command.argv[1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    assert option(command.argv, "--quantization") == option(command.argv, "--load-format") == ["syshax"]
    assert option(command.argv, "--served-model-name") == ["Qwen3-30B-A3B"]
    assert int(option(command.argv, "--kv-cache-memory-bytes")[0]) == 64 * MIB
    assert command.argv[-2:] == ["--port", "8001"]
    assert command.environment == {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}


def test_vllm_serve_where_it_exists() -> None:
    argv = worker_command("org/model", [], facts(has_serve=True), {}).argv
    assert argv[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    assert "--served-model-name" not in argv


def test_the_users_choices_win(tmp_path: Path) -> None:
    words = ["-q", "syshax", "--load_format=syshax", "--served-model-name", "m", "--kv_cache_memory_bytes=5"]
    environment = {"HF_HUB_OFFLINE": "0", "VLLM_CPU_OMP_THREADS_BIND": "7"}
    command = worker_command(str(tmp_path), words, facts(), environment)
    assert command.argv[5:] == words
    assert command.environment == {}


def test_vllms_own_config_file_counts_as_the_user(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("served-model-name: m\nkv_cache_memory_bytes: 123\n")
    argv = worker_command(str(tmp_path), ["--config", str(file)], facts(), {}).argv
    assert "--served-model-name" not in argv and "--kv-cache-memory-bytes" not in argv
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        worker_command(str(tmp_path), ["--config", "missing.yaml"], facts(), {})


@pytest.mark.parametrize("words", [["-q", "fp8"], ["--quantization=awq"], ["--load-format", "dummy"]])
def test_options_that_would_turn_syshax_off_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="compute the experts itself"):
        worker_command("m", words, facts(), {})


def test_sharing_cpus_is_said_and_nobody_spins() -> None:
    command = worker_command("m", [], facts(cpus=CpuPlan(((0, 1),), (0, 1), True)), {})
    assert command.environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert any("share" in note for note in command.notes)


def test_device_graphs_are_cut_around_the_experts() -> None:
    ops = ("vllm::attention", "vllm::moe_forward")
    device = facts(cpu_platform=False, splitting_ops=ops)
    command = worker_command("m", [], device, {})
    graphs = json.loads(option(command.argv, "--compilation-config")[0])
    assert graphs == {"cudagraph_mode": "PIECEWISE", "splitting_ops": list(ops)}
    assert "--kv-cache-memory-bytes" not in command.argv and command.environment == {}
    for chosen in (["--enforce-eager"], ["-cc", "{}"], ["-O", "1"], ["--compilation-config", "{}"]):
        words = worker_command("m", chosen, device, {}).argv
        assert option(words, "--compilation-config") == option(chosen, "--compilation-config")


@pytest.mark.parametrize(
    ("words", "available", "size", "whole"),
    [
        ([], 8 * GIB, 64 * MIB, True),
        (["--max-model-len", "1000000"], 1 * GIB, 256 * MIB, False),
        (["--max-model-len=100000"], 64 * GIB, 8 * 100_000 * 2 * 4 * 2 * 32 * 2 // MIB * MIB, True),
        (
            ["--max-model-len=100000", "--dtype", "float32"],
            64 * GIB,
            8 * 100_000 * 2 * 4 * 2 * 32 * 4 // MIB * MIB,
            True,
        ),
    ],
)
def test_kv_cache_size(words: list[str], available: int, size: int, whole: bool) -> None:
    assert kv_cache_bytes(CONFIG, Options(words), available) == (size, whole)


def test_a_length_that_does_not_fit_is_left_to_vllm() -> None:
    config = CONFIG | {"max_position_embeddings": 10_000_000}
    command = worker_command("m", [], facts(config=config), {})
    assert option(command.argv, "--max-model-len") == ["-1"]
    assert any("shortens" in note for note in command.notes)


def test_our_options_are_found_anywhere() -> None:
    words = ["--syshax-model", "m", "MODEL", "-tp", "2", "--runtime-dir=/r", "--port", "1", "--dry-run"]
    ours, model, rest = split_words(words)
    assert (ours.syshax_model, ours.runtime_dir, ours.dry_run) == ("m", "/r", True)
    assert (model, rest) == ("MODEL", ["-tp", "2", "--port", "1"])


@pytest.mark.parametrize("words", [[], ["--port", "1"], ["--syshax-model", "m"], ["-tp", "2", "MODEL"]])
def test_model_must_come_first(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="MODEL"):
        split_words(words)


@pytest.mark.parametrize(
    ("mode", "cpu", "message"),
    [
        ("cuda", True, "vLLM here is built for CPUs"),
        ("npu", True, "vLLM here is built for CPUs"),
        ("cpu", False, "vLLM here is built for an accelerator"),
        ("npu", False, "has no vllm-ascend"),
        ("maca", False, "has no vllm-metax"),
    ],
)
def test_a_platform_other_than_the_administrators_is_refused(mode: AcceleratorMode, cpu: bool, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_platform(mode, cpu)
    assert message in caught.value.message
    assert f'accelerator.mode is "{mode}"' in caught.value.message
    assert "config set accelerator.mode" in caught.value.hint


@pytest.mark.parametrize(("mode", "cpu"), [("auto", True), ("auto", False), ("cpu", True), ("cuda", False)])
def test_the_administrators_platform_is_accepted(mode: AcceleratorMode, cpu: bool) -> None:
    check_platform(mode, cpu)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], "http://0.0.0.0:8000"),
        (["--port", "8001", "--host=10.0.0.5"], "http://10.0.0.5:8001"),
        (["--host", "::1", "--port", "9"], "http://[::1]:9"),
        (["--uds", "/run/w.sock", "--port", "9"], "unix:/run/w.sock"),
    ],
)
def test_the_daemon_is_told_where_vllm_will_answer(words: list[str], address: str) -> None:
    assert worker_address(words) == address


def test_vllms_own_file_says_where_too(tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text("port: 8123\n")
    assert worker_address(["--config", str(tmp_path / "vllm.yaml")]) == "http://0.0.0.0:8123"
