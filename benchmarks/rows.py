"""Decoding steps of several rows against one row, in turns, one run.

    python benchmarks/rows.py [--threads 2] [--rounds 5] [--rows 1 2 4 8 16 32] [--keys 64]

SmolLM2 from its 4-bit file, with activations in float32 and in 8 bits, and with its weights in
float32 and bfloat16; within ``ph.batch_invariant()``, where a row has the bits it has alone: they
are compared first. A turn is ten steps, one after another as in a server. The last line is JSON, in
seconds of a step.
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

STEPS = 10
WAYS: dict[str, dict[str, Any]] = {
    "4-bit file": {},
    "4-bit file, activations='int8'": {"activations": "int8"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
}


class Steps:
    """Steps of some rows of a model, each behind as many keys.

    Args:
        model: A decoder.
        rows: How many.
        keys: Tokens of every row.
    """

    def __init__(self, model: ph.LanguageModel, rows: int, keys: int) -> None:
        self._transformer = model.transformer
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, 40_000, (rows, keys + 1), generator=random)
        self._cache, self._ids = self._transformer.new_cache(), ids[:, keys:]
        self._transformer.hidden_states(ids[:, :keys], cache=self._cache, last=1)

    def step(self) -> torch.Tensor:
        """The logits ``[rows, 1, V]`` behind one token more."""
        hidden = self._transformer.hidden_states(self._ids, cache=self._cache, last=1)
        return self._transformer.logits(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--keys", type=int, default=64)
    options = parser.parse_args()
    if min(options.rows) < 1:
        parser.error(f"--rows must be from 1: got {min(options.rows)}")
    torch.set_num_threads(options.threads)
    found: dict[str, dict[int, float]] = {}
    for name, how in WAYS.items():
        model = ph.load("smollm2", **how)
        with torch.inference_mode(), ph.batch_invariant():
            steps = {rows: Steps(model, rows, options.keys) for rows in (1, *options.rows)}
            alone = steps[1].step()
            for rows, each in steps.items():
                if rows > 1 and not torch.equal(each.step()[:1], alone):
                    raise SystemExit(f"{name}: the first of {rows} rows differs from it alone")
            times: dict[int, list[float]] = {rows: [] for rows in steps}
            for _ in range(options.rounds):
                for rows, each in steps.items():
                    begin = time.perf_counter()
                    for _ in range(STEPS):
                        each.step()
                    times[rows].append((time.perf_counter() - begin) / STEPS)
        found[name] = {rows: statistics.median(taken) for rows, taken in times.items()}
        one = found[name][1]
        cells = [f"{rows}: {t * 1e3:.1f} ms, {t / one:.2f} ×" for rows, t in found[name].items()]
        print(f"{name}: {' · '.join(cells)}")
    print(json.dumps({"processor": platform.processor(), "seconds": found}))


if __name__ == "__main__":
    main()
