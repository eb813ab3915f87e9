"""Greedy tokens of transformers in float32, as JSON on stdout: `python reference.py PROMPTS NEW_TOKENS CHECKPOINT...`.

A process of its own so that a test's memory does not hold the reference models beside the server. Prints a list of
{"tokens": [[...], ...], "margin": smallest distance of the two best logits at any step}, one for each checkpoint.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ALL_PROMPTS = [
    "def main():\n",
    "import os\nfor x in range(10):\n    print(",
    'class Foo(object):\n    """Doc',
    "return self._value\n\nraise ValueError(",
]


def greedy(path: str, prompts: int, new_tokens: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens, margin = [], float("inf")
    for prompt in ALL_PROMPTS[:prompts]:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(made.sequences[0, ids.shape[1] :].tolist())
        best = torch.stack(made.logits).float().topk(2).values
        margin = min(margin, (best[..., 0] - best[..., 1]).min().item())
    return {"tokens": tokens, "margin": margin}


if __name__ == "__main__":
    amounts = int(sys.argv[1]), int(sys.argv[2])
    print(json.dumps([greedy(path, *amounts) for path in sys.argv[3:]]))
