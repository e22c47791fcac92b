"""The kernels against torch's SDPA in one run: interleaved, medians, equality checked first.

    python benchmarks/kernels.py [--quick]

A ratio above 1 means that polyhead is faster than the peer of that line. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import polyhead as ph
from polyhead.kernels import KERNELS


def timed(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taken in turns so that all meet the same noise."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def draw(H: int, G: int, T: int, S: int, D: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = [(1, H, T, D), (1, G, S, D), (1, G, S, D)]
    return tuple(torch.randn(*shape).to(dtype) for shape in shapes)


def agree(a: Tensor, b: Tensor) -> None:
    error = (a.double() - b.double()).abs().max().item()
    allowed = 1e-5 if a.dtype == torch.float32 else 3e-2
    if not error < allowed:
        raise SystemExit(f"results differ by {error}: nothing to compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter sequences")
    quick = parser.parse_args().quick
    rounds, most = (5, 1024) if quick else (15, 2048)
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}

    def compare(name: str, functions: dict[str, Callable[[], Tensor]]) -> None:
        results = [function() for function in functions.values()]
        for result in results[1:]:
            agree(results[0], result)
        times = timed(functions, rounds)
        peer, *ours = times
        found[name] = {k: round(v * 1e3, 4) for k, v in times.items()}
        for key in ours:
            found[name][f"{key} ratio"] = round(times[peer] / times[key], 3)
        print(f"{name:42}", found[name], flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        for T in (512, most):
            q, k, v = draw(8, 8, T, T, 64, dtype)
            compare(
                f"prefill {T} causal 8/8 × 64 {kind}, ms",
                {
                    "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                        q, k, v, is_causal=True
                    ),
                    "tiled": lambda q=q, k=k, v=v: ph.attention(
                        q, k, v, mask=ph.Causal(), kernel="tiled"
                    ),
                },
            )
        q, k, v = draw(32, 8, 1, 4096, 128, dtype)
        compare(
            f"decode 4096 keys 32/8 × 128 {kind}, ms",
            {
                "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(
                    q, k, v, enable_gqa=True
                ),
                "tiled": lambda q=q, k=k, v=v: ph.attention(q, k, v, kernel="tiled"),
            },
        )
    T = 4 * most
    q, k, v = draw(8, 8, T, T, 64, torch.float32)
    full = timed({"t": lambda: ph.attention(q, k, v, mask=ph.Causal(), kernel="tiled")}, 1)["t"]
    window = ph.Causal() & ph.Window(T // 32)
    part = timed({"t": lambda: ph.attention(q, k, v, mask=window, kernel="tiled")}, 1)["t"]
    found["window"] = {"tokens": T, "window": T // 32, "full/window": round(full / part, 2)}
    print("a window of T/32 against full causal", found["window"])

    q, k, v = draw(4, 2, 1, 4, 16, torch.float32)
    times = timed(
        {
            "bare": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "attention": lambda: ph.attention(q, k, v),
        },
        3000,
    )
    found["overhead"] = {"microseconds": round((times["attention"] - times["bare"]) * 1e6, 2)}
    print("overhead of attention() over the bare kernel, µs", found["overhead"]["microseconds"])
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    report = {"machine": machine, "torch": torch.__version__, "kernels": [*KERNELS]}
    print(json.dumps(report | {"results": found}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
