"""vLLM in one process, driven line by line: what the end-to-end tests start, talk to, and kill.

Reads one JSON object a line from stdin and answers each with one on the descriptor given as argument, so that vLLM's
own output cannot mix in. The engine runs inside this process, which is the fastest way for vLLM to start; several
models may follow each other.

    {"do": "start", "options": {...}}             -> {"ok": true}
    {"do": "generate", "prompts": [...], "new_tokens": n}  -> {"tokens": [[...]], "passes": forward passes}
    {"do": "chat", "turns": [...], "new_tokens": n}        -> {"tokens": [[...]], "best": [[{token: logprob}]]}
    {"do": "nll", "windows": [[token, ...]]}      -> {"sum": nats, "count": tokens predicted}
    {"do": "time", "prompt_tokens": n, "new_tokens": m}    -> {"seconds": wall time of one answer}
    {"do": "stop"}                                -> {"ok": true}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

COMMON = {
    "quantization": "syshax",
    "load_format": "syshax",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}


class Engine:
    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.passes = 0

    def start(self, options: dict[str, Any]) -> dict[str, Any]:
        self.passes = 0
        self.llm = LLM(**(COMMON | options))
        if options.get("enforce_eager"):
            self.llm.apply_model(self._count_passes)
        return {"ok": True}

    def _count_passes(self, model: Any) -> None:
        def count(*_: Any) -> None:
            self.passes += 1

        model.register_forward_hook(count)

    def generate(self, prompts: list[str], new_tokens: int) -> dict[str, Any]:
        assert self.llm is not None
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        return {"tokens": [list(answer.outputs[0].token_ids) for answer in answers], "passes": self.passes}

    def chat(self, turns: list[str], new_tokens: int) -> dict[str, Any]:
        """One answer to each user turn, and the eight likeliest tokens at each step of it."""
        assert self.llm is not None
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, logprobs=8)
        talks = [[{"role": "user", "content": turn}] for turn in turns]
        made = [answer.outputs[0] for answer in self.llm.chat(talks, sampling, use_tqdm=False)]
        best = [[{token: known.logprob for token, known in step.items()} for step in one.logprobs] for one in made]
        return {"tokens": [list(one.token_ids) for one in made], "best": best}

    def nll(self, windows: list[list[int]]) -> dict[str, Any]:
        """Negative log likelihood of each window's tokens after its first."""
        assert self.llm is not None
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": window} for window in windows]
        total, count = 0.0, 0
        for answer in self.llm.generate(prompts, sampling, use_tqdm=False):
            for token, known in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True):
                total -= known[token].logprob
                count += 1
        return {"sum": total, "count": count}

    def time(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        assert self.llm is not None
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        prompt = {"prompt_token_ids": [token * 37 % 256 for token in range(prompt_tokens)]}
        begin = time.perf_counter()
        self.llm.generate([prompt], sampling, use_tqdm=False)
        return {"seconds": time.perf_counter() - begin}

    def stop(self) -> dict[str, Any]:
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
        return {"ok": True}


def main(out_fd: int) -> None:
    engine = Engine()
    with os.fdopen(out_fd, "w", buffering=1) as out:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(engine, command.pop("do"))(**command)
            except Exception as error:  # noqa: BLE001  (told to the test, whatever it is)
                traceback.print_exc()
                answer = {"error": type(error).__name__, "message": str(error)}
                engine.stop()
            out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
