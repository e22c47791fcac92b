"""What ``ph.batch_invariant()`` costs: prompts and decoding steps of SmolLM2 with it and without.

    python benchmarks/reproducible.py [--dtype bfloat16 | float32 | file] [--threads 2]
                                      [--rounds 7] [--work 256 1024 1x 6x]

``256`` is a prompt of 256 tokens, ``6x`` a decoding step of 6 rows after 64 tokens; ``file`` are
the weights of the 4-bit file, with float32. Logits are compared first (one position in ten may
differ by more: some of random tokens are sensitive), then both are timed in turns; the ratio is the
median of those of neighbours. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import polyhead as ph
from polyhead.models import Transformer

STEPS, PAST = 8, 64


Timed = Callable[[], tuple[Tensor, float]]
"""Gives logits and seconds."""


def prompt(model: Transformer, length: int) -> Timed:
    ids = torch.randint(model.config.vocab_size, (1, length))

    def run() -> tuple[Tensor, float]:
        start = time.perf_counter()
        logits = model(ids)
        return logits, time.perf_counter() - start

    return run


def steps(model: Transformer, rows: int) -> Timed:
    """A step, of several after the same past."""
    ids = torch.randint(model.config.vocab_size, (rows, PAST + STEPS))

    def run() -> tuple[Tensor, float]:
        cache = model.new_cache()
        logits = model(ids[:, :PAST], cache=cache)
        start = time.perf_counter()
        for i in range(PAST, PAST + STEPS):
            logits = model(ids[:, i : i + 1], cache=cache)
        return logits, (time.perf_counter() - start) / STEPS

    return run


def within(run: Timed) -> tuple[Tensor, float]:
    with ph.batch_invariant():
        return run()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "file"))
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--work", nargs="+", default=["256", "1024", "1x", "6x"])
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    settings = {} if given.dtype == "file" else {"dtype": given.dtype}
    model = ph.load("smollm2", **settings).transformer
    found = {"machine": platform.machine(), "dtype": given.dtype, "threads": given.threads}
    with torch.inference_mode():
        for name in given.work:
            run = steps(model, int(name[:-1])) if name.endswith("x") else prompt(model, int(name))
            plain, same = (made[:, :256].float() for made in (run()[0], within(run)[0]))
            apart = (plain - same).norm(dim=-1) / plain.norm(dim=-1)
            assert apart.quantile(0.9) <= 0.03, "other logits"
            pairs = [(run()[1], within(run)[1]) for _ in range(given.rounds)]
            usual, other = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(f"{name}: {usual * 1e3:.1f} ms, {other * 1e3:.1f} ms reproducible, {ratio:.2f} x")
            found[name] = ratio
    print(json.dumps(found))


if __name__ == "__main__":
    main()
