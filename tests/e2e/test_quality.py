"""How good the answers are: the demo model's text and perplexity in every format, through real vLLM and real syshaxd.

Everything compares float32 activations. Text is compared with plain vLLM's; perplexity with transformers' on the very
weights that the format holds (decoded), so that a format's own loss does not hide a wrong kernel.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_prompts import CHAT_PROMPTS, MORE_PROMPTS
from services import HERE, Daemon, EngineProcess

pytestmark = [pytest.mark.vllm, pytest.mark.model]

MODEL = Path(os.environ.get("SYSHAX_DEMO_MODEL", ".demo/model")).resolve()
PLAIN = {"quantization": None, "load_format": "auto"}
ENGINE = {"enforce_eager": True, "max_model_len": 1056, "max_num_batched_tokens": 1056, "max_num_seqs": 20}
SHORT = os.environ.get("QUALITY_TESTS") == "short"
"""An eighth of the text, and eight short turns without what is counted over many."""
TOKENS, WINDOW = (1024 if SHORT else 8192), 1024
TURNS, NEW_TOKENS = (CHAT_PROMPTS[:8], 16) if SHORT else (CHAT_PROMPTS, 32)
FORMATS = ("bf16", "fp16", "q8_0", "q4_0")
PERPLEXITY = 0.002
"""How far it may be from transformers' on the same weights."""
ALLOWANCE = 6
"""Turns of sixty: two standard deviations of the difference between two counts of turns with near ties."""
NEAR_TIE = 0.7
"""Nats: text may leave plain vLLM's only where two tokens were about equally likely (one at most twice the other)."""


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Any]]:
    """What the tests tell about the run as a whole, printed at its end."""
    results: dict[str, Any] = {}
    yield results
    print("\nquality of the demo model: " + json.dumps(results, indent=1))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """transformers' perplexity for the checkpoint and for each integer format, and the tokens it was computed on."""
    command = [sys.executable, str(HERE / "perplexity_reference.py"), str(MODEL), str(TOKENS), str(WINDOW)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def plain(engine: EngineProcess) -> dict[str, Any]:
    """Plain vLLM's greedy answers to the turns, by dtype, and to the forty others (`more`)."""
    answers: dict[str, Any] = {"more": {}}
    for dtype in ("float32",) if SHORT else ("float32", "bfloat16"):
        engine.start(MODEL, **ENGINE, **PLAIN, dtype=dtype)
        answers[dtype] = chat(engine, TURNS, NEW_TOKENS)
        if not SHORT:
            answers["more"][dtype] = chat(engine, MORE_PROMPTS, 16)
        engine.call("stop")
    return answers


def chat(engine: EngineProcess, turns: list[str], new_tokens: int) -> dict[str, Any]:
    answer = engine.call("chat", turns=turns, new_tokens=new_tokens)
    assert "error" not in answer, answer
    return answer


def equal_turns(a: dict[str, Any], b: dict[str, Any]) -> list[int]:
    """Numbers of the turns whose first 16 tokens are equal."""
    pairs = zip(a["tokens"], b["tokens"], strict=True)
    return [turn for turn, (x, y) in enumerate(pairs) if x[:16] == y[:16]]


def gaps(answers: dict[str, Any], exact: dict[str, Any]) -> list[float]:
    """Where an answer first leaves the exact one: by how many nats the exact run found its own token likelier."""
    found = []
    for ours, theirs, best in zip(answers["tokens"], exact["tokens"], exact["best"], strict=True):
        step = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
        if step is not None:
            known = best[step]
            found.append(known[str(theirs[step])] - known.get(str(ours[step]), -math.inf))
    return sorted(round(gap, 3) for gap in found)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FORMATS)
def test_format(
    name: str,
    daemon: Daemon,
    engine: EngineProcess,
    plain: dict[str, Any],
    expected: dict[str, Any],
    made: dict[str, Any],
) -> None:
    settings = {"syshax": {"model": f"demo-{name}", "format": name}}
    engine.start(MODEL, **ENGINE, additional_config=settings)
    try:
        answers = chat(engine, TURNS, NEW_TOKENS)
        more = chat(engine, MORE_PROMPTS, 16) if name == "q8_0" and not SHORT else None
        nll = engine.call("nll", windows=expected["windows"])
    finally:
        engine.call("stop")
        daemon.control.delete(f"/v1/models/demo-{name}")
    assert "error" not in nll, nll
    perplexity = math.exp(nll["sum"] / nll["count"])
    reference = expected["perplexity"].get(name, expected["perplexity"]["bf16"])
    same = equal_turns(answers, plain["float32"])
    made[name] = {
        "perplexity": perplexity,
        "transformers": reference,
        "difference": perplexity / reference - 1,
        "rise_over_bf16": perplexity / expected["perplexity"]["bf16"] - 1,
        "turns_equal_for_16_tokens": f"{len(same)} of {len(TURNS)}: {same}",
        "gaps_where_text_leaves": gaps(answers, plain["float32"]),
    }
    if not SHORT:
        beside_bfloat16(made[name], plain, same, more)
    assert abs(perplexity / reference - 1) <= PERPLEXITY, made[name]
    if name != "q4_0":  # whose own loss of a seventh in perplexity chooses other words
        assert all(gap <= NEAR_TIE for gap in made[name]["gaps_where_text_leaves"]), made[name]
    if name in ("bf16", "fp16"):
        assert answers["tokens"] == plain["float32"]["tokens"], "the same text as plain vLLM's, to the last token"


def beside_bfloat16(made: dict[str, Any], plain: dict[str, Any], same: list[int], more: dict[str, Any] | None) -> None:
    """How the turns that a format keeps compare with those that plain vLLM's own bfloat16 run keeps."""
    own_loss = equal_turns(plain["bfloat16"], plain["float32"])
    made["of_vllm_bfloat16"] = f"{len(own_loss)} of {len(TURNS)}: {own_loss}"
    made["gaps_of_vllm_bfloat16"] = gaps(plain["bfloat16"], plain["float32"])
    if more:
        of_sixty = len(same) + len(equal_turns(more, plain["more"]["float32"]))
        own_of_sixty = len(own_loss) + len(equal_turns(plain["more"]["bfloat16"], plain["more"]["float32"]))
        made["of_sixty"] = f"{of_sixty}; vLLM's own bfloat16: {own_of_sixty}"
        assert of_sixty >= own_of_sixty - ALLOWANCE, made
