"""vLLM with its experts in syshaxd against vLLM alone: tokens per second in decode and in prefill, on the same CPUs.

    python tests/e2e/compare_vllm.py [--formats q8_0,q4_0] [--output FILE] [--model DIR]

Three layers of Qwen3-30B-A3B's geometry with random weights, bfloat16, which is all that vLLM's CPU platform offers
such a model. Each configuration starts vLLM anew; each figure is the best of a few repetitions, since other work on
the machine only takes away. Ends with exit status 1 when a ratio is below TARGET. `make bench-vllm` runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models import QWEN3_30B_A3B, write_checkpoint
from services import Daemon, EngineProcess

TARGET = 1.3
PROMPT, NEW_TOKENS, REPEATS = 1024, 48, 3
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": PROMPT + NEW_TOKENS + 8,
    "max_num_batched_tokens": PROMPT + NEW_TOKENS + 8,
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
}
ALONE = {"quantization": None, "load_format": "auto"}


def tokens_per_second(engine: EngineProcess, model: Path, options: dict[str, Any]) -> dict[str, float]:
    """Prefill of PROMPT tokens; decode of one sequence, its prefill taken away."""
    engine.start(model, **ENGINE, **options)
    engine.call("time", prompt_tokens=PROMPT, new_tokens=2)
    prefill, decode = [], []
    for _ in range(REPEATS):
        first = engine.call("time", prompt_tokens=PROMPT, new_tokens=1)["seconds"]
        short = engine.call("time", prompt_tokens=16, new_tokens=1)["seconds"]
        long = engine.call("time", prompt_tokens=16, new_tokens=1 + NEW_TOKENS)["seconds"]
        prefill.append(PROMPT / first)
        decode.append(NEW_TOKENS / (long - short))
    engine.call("stop")
    return {"prefill": round(max(prefill), 2), "decode": round(max(decode), 2)}


def measure(model: Path, base: Path, formats: list[str]) -> dict[str, dict[str, float]]:
    daemon = Daemon(base)
    engine = EngineProcess(base / "engine.log", {"SYSHAX_RUNTIME_DIR": str(daemon.runtime_dir)})
    try:
        figures = {"vLLM alone, bf16": tokens_per_second(engine, model, ALONE)}
        for name in formats:
            options = {"additional_config": {"syshax": {"model": f"compared-{name}", "format": name}}}
            figures[name] = tokens_per_second(engine, model, options)
            daemon.control.delete(f"/v1/models/compared-{name}")
        return figures
    finally:
        engine.end()
        daemon.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", default="q8_0,q4_0")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", type=Path, help="where the checkpoint is, or is made [a temporary directory]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="syshax-compare-") as folder:
        model = arguments.model or Path(folder) / "model"
        if not (model / "config.json").exists():
            write_checkpoint(dataclasses.replace(QWEN3_30B_A3B, layers=3), model)
        figures = measure(model, Path(folder), arguments.formats.split(","))
    alone, short = figures["vLLM alone, bf16"], 0
    for name, figure in figures.items():
        ratios = {part: round(figure[part] / alone[part], 2) for part in alone}
        words = ", ".join(f"{part} {figure[part]:.1f} tokens/s ({ratios[part]:.2f} x)" for part in alone)
        print(f"{name}: {words}")
        short += name != "vLLM alone, bf16" and min(ratios.values()) < TARGET
    if arguments.output:
        arguments.output.write_text(json.dumps({"target": TARGET, "tokens_per_second": figures}, indent=1) + "\n")
    print(f"falls short of {TARGET} x" if short else f"all at least {TARGET} x vLLM alone")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
