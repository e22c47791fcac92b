"""What it costs to see every head: a probe over long attention, and a look at a long file.

    python benchmarks/heads.py [--tokens 32768] [--heads 16] [--rounds 3] [--look 4096]

First one attention, causal, head size 64, float32: plain, and under a probe that measures entropy,
the 8 largest weights of every row and the weight that every key receives. Outputs must be
bit-identical and 256 random rows equal float64. Then ``polyhead look`` as a process of its own on a
file of SmolLM2. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

import polyhead as ph
from polyhead.layers.hooks import Hooked
from polyhead.semantics import DenseSource

STATISTICS = ("entropy", "top_weights", "top_keys", "received")
ROWS = 256
HEAD_SIZE = 64


class Plain(Hooked):
    """Causal attention and nothing else."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(
            q, DenseSource(k, v), mask=ph.Causal(), bias=None, scale=q.shape[-1] ** -0.5,
            q_positions=None, dropout_p=0.0, kernel="auto",
        )  # fmt: skip


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def forget_peak() -> None:
    """From now on ``peak`` counts anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most memory that this process held since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def seen_of(model: Plain, tensors: list[Tensor]) -> tuple[Tensor, Any]:
    with ph.probe(model, top_k=8) as seen:
        out = model(*tensors)
    view = seen[0]
    view.measure(STATISTICS)
    return out, view


def rows_against_float64(view: Any, q: Tensor, k: Tensor) -> dict[str, float]:
    """The greatest differences from the formula in float64, over random rows of random heads."""
    generator = torch.Generator().manual_seed(1)
    heads = torch.randint(q.shape[1], (ROWS,), generator=generator).tolist()
    queries = torch.randint(q.shape[2], (ROWS,), generator=generator).tolist()
    errors = dict.fromkeys(("weights", "entropy", "top_weights"), 0.0)
    for head, query in zip(heads, queries, strict=True):
        scores = (k[0, head, : query + 1].double() @ q[0, head, query].double()) * HEAD_SIZE**-0.5
        exact = scores.softmax(-1)
        row = view.rows([head], slice(query, query + 1))[0, 0, 0].double()
        top = exact.topk(min(8, len(exact))).values
        found = {
            "weights": (row[: query + 1] - exact).abs().max(),
            "entropy": (view.entropy[0, head, query] - torch.special.entr(exact).sum()).abs(),
            "top_weights": (view.top_weights[0, head, query, : len(top)] - top).abs().max(),
        }
        errors = {name: max(errors[name], float(found[name])) for name in errors}
        if row[query + 1 :].any():
            raise SystemExit(f"head {head}, query {query} has weight on what it may not see")
    if errors["weights"] > 1e-6:
        raise SystemExit(f"weights differ from float64 by {errors['weights']:.1e}")
    return errors


def probe_costs(tokens: int, heads: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, tokens, HEAD_SIZE) for _ in range(3)]
    model, given = Plain(), sum(x.nbytes for x in tensors)
    times: dict[str, list[float]] = {"plain": [], "seen": []}
    plain = model(*tensors)  # warms up
    extra = 0
    for _ in range(rounds):
        seconds, plain = timed(lambda: model(*tensors))
        times["plain"].append(seconds)
        held = psutil.Process().memory_info().rss
        forget_peak()
        seconds, (out, view) = timed(lambda: seen_of(model, tensors))
        times["seen"].append(seconds)
        extra = max(extra, peak() - held)
    if not torch.equal(out, plain):
        raise SystemExit("the output changes under a probe")
    errors = rows_against_float64(view, tensors[0], tensors[1])
    median = {name: statistics.median(taken) for name, taken in times.items()}
    pairs = [b / a for a, b in zip(times["plain"], times["seen"], strict=True)]
    return {
        "tokens": tokens,
        "heads": heads,
        "seconds": {name: round(value, 2) for name, value in median.items()},
        "time_ratio": round(statistics.median(pairs), 2),
        "extra_memory_over_qkv": round(extra / given, 2),
        "kept_bytes_over_qkv": round(view.nbytes / given, 2),
        "max_error": errors,
        "bit_identical": True,
    }


def look_costs(tokens: int) -> dict[str, Any]:
    """``polyhead look`` on a file of so many tokens, and the most memory that it took."""
    import pydoc_data.topics

    model = ph.load("smollm2")
    prose = "\n".join(pydoc_data.topics.topics.values())[: 6 * tokens]
    text = model.tokenizer.decode(model.tokenizer.encode(prose)[:tokens])
    count = len(model.tokenizer.encode(text))
    del model
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "polyhead.cli", "look", "--file", str(file), "-n", "0"]
        seconds, done = timed(
            lambda: subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n".join(done.stdout.splitlines()[:8]))
    return {
        "tokens": count,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=32_768)
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--look", type=int, default=4096, help="tokens of the file; 0: no look")
    given = options.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs", flush=True)
    if given.look:  # first, while this process is small: a child begins with its parent's memory
        found["look"] = look_costs(given.look)
    with torch.inference_mode():
        found["probe"] = probe_costs(given.tokens, given.heads, given.rounds)
    for name in ("probe", "look"):
        for key, value in found.get(name, {}).items():
            print(f"  {name:<6} {key:<22} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
