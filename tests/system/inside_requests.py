"""Runs inside the box: a client that attaches, computes requests and writes down what it asked and what it got.

    inside_requests.py MODEL OUT.npz [--requests N | --forever] [--pause S]

Prints "pid N", "connecting", "attached", then "request I" and "answer I" for each, for tests to follow;
it says no more after LINES of them, since nobody may be reading. --forever: until it is killed; nothing is written
then, and it goes on saying what it does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time

import numpy as np

from syshax import Client

TOKENS, WAIT, LINES = 4, 60.0, 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forever", action="store_true")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    rows: list[tuple[np.ndarray, ...]] = []
    print(f"pid {os.getpid()}\nconnecting", flush=True)
    with Client() as client, client.open(arguments.model, max_tokens=TOKENS, wait=WAIT) as model:
        print("attached", flush=True)
        geometry = model.geometry
        for number in itertools.count() if arguments.forever else range(arguments.requests):
            say = print if number < LINES or arguments.forever else lambda *_, **__: None
            layer = number % geometry.num_layers
            x = random.standard_normal((TOKENS, geometry.hidden_size), np.float32)
            ids = np.stack([random.permutation(geometry.num_experts)[: model.top_k] for _ in range(TOKENS)])
            weights = random.random(ids.shape, np.float32)
            say(f"request {number}", flush=True)
            y = model.moe(layer, x, ids.astype(np.int32), weights, reconnect_s=WAIT)
            say(f"answer {number}", flush=True)
            rows.append((np.array(layer), x, ids, weights, y))
            if arguments.forever:
                rows.clear()
            time.sleep(arguments.pause)
    if arguments.out:
        names = ("layer", "x", "ids", "weights", "y")
        np.savez(
            arguments.out, **{name: np.stack(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}
        )


if __name__ == "__main__":
    main()
