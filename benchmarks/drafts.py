"""Tokens guessed in the serving engine, against none, in turns, one run.

    python benchmarks/drafts.py [--threads 2] [--rounds 3] [--callers 1 8] [--tokens 64]

SmolLM2's weights as float32 are the model, its 4-bit file is the draft, which so guesses much the
same at a fraction of the bytes. Texts continue greedily, and are compared first: guesses change
none. The last line is JSON, in seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch

import polyhead as ph
from polyhead.serving.engine import Engine

PROMPTS = (
    "The history of the lighthouse begins with",
    "def quicksort(numbers):\n",
    "A recipe for bread: take 500 g of flour,",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics are",
    "To install Python on Linux,",
    "My grandmother used to tell me that",
    "The capital cities of Europe are",
)


def run(engine: Engine, callers: int, tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """The texts, and the seconds they took."""
    begin = time.perf_counter()
    found = [
        engine.submit(PROMPTS[n % len(PROMPTS)], max_new_tokens=tokens, temperature=0)
        for n in range(callers)
    ]
    while engine.step():
        pass
    return [request.result(0).ids for request in found], time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, draft = ph.load("smollm2", "float32"), ph.load("smollm2")
    ways: dict[str, dict[str, Any]] = {
        "no guesses": {},
        "prompt lookup": {"lookup_tokens": 7},
        "4-bit draft": {"draft": draft, "draft_tokens": 7},
    }
    print(f"{platform.machine()}, {options.threads} threads, float32 and 4 bits, tokens a second")
    found = []
    for callers in options.callers:
        room: dict[str, Any] = {"max_tokens": callers * 512, "share_prefixes": False}
        engines = {name: Engine(model, **room, **more) for name, more in ways.items()}
        texts = {name: run(each, callers, options.tokens)[0] for name, each in engines.items()}
        assert len({str(each) for each in texts.values()}) == 1, "guesses changed a text"
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, engine in engines.items():
                times[name].append(run(engine, callers, options.tokens)[1])
        taken = {name: statistics.median(each) for name, each in times.items()}
        for name, engine in engines.items():
            stats, rate = engine.stats, callers * options.tokens / taken[name]
            share = stats.accepted_tokens / max(1, stats.guessed_tokens)
            faster = taken["no guesses"] / taken[name]
            print(
                f"{callers:>3} callers  {name:16}{rate:>8.1f}{faster:>7.2f} x   "
                f"{share:>4.0%} of {stats.guessed_tokens} guesses right"
            )
        found.append({"callers": callers, **taken})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
