"""transformers' perplexity of a Mixtral checkpoint in float32: as it is, and with each integer format's weights.

    python perplexity_reference.py CHECKPOINT TOKENS WINDOW

The text is the standard library's own `pydoc_data.topics` in sorted order. Prints one JSON object:
{"windows": [[token, ...], ...], "perplexity": {"bf16": p, "q8_0": p, "q4_0": p}}. A window's first token is not
predicted.
"""

from __future__ import annotations

import json
import math
import sys
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from syshaxd import _core


def windows_of(path: str, tokens: int, window: int) -> list[list[int]]:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(path)(text, add_special_tokens=False).input_ids[:tokens]
    assert len(ids) == tokens, f"the text has only {len(ids)} tokens"
    return [ids[begin : begin + window] for begin in range(0, tokens, window)]


def decoded(format_name: str, weights: torch.Tensor) -> torch.Tensor:
    """The weights as the format holds them: rows are whole blocks."""
    values, _ = _core.format_blocks(format_name)
    assert weights.shape[-1] % values == 0
    flat = weights.float().contiguous().view(-1).numpy()
    return torch.from_numpy(_core.decode(format_name, _core.encode(format_name, flat), flat.size)).view(weights.shape)


def perplexity(model: Any, windows: list[list[int]]) -> float:
    total = count = 0.0
    for window in windows:
        ids = torch.tensor([window])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return math.exp(total / count)


def main(path: str, tokens: int, window: int) -> None:
    windows = windows_of(path, tokens, window)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    assert experts, "no expert weights were found"
    original = {name: p.detach().clone() for name, p in experts.items()}
    found = {"bf16": perplexity(model, windows)}
    for format_name in ("q8_0", "q4_0"):
        for name, p in experts.items():
            p.data.copy_(decoded(format_name, original[name]))
        found[format_name] = perplexity(model, windows)
    print(json.dumps({"windows": windows, "perplexity": found}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
