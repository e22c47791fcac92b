"""What `polyhead bench` has no row for: a window's gain, a new length's cost, a call's overhead.

    python benchmarks/kernels.py [--quick]

The last line is JSON.
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
from polyhead import native
from polyhead.kernels import KERNELS
from polyhead.native.arguments import KVSegment


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


def window_gain(tokens: int, size: int, kernel: str) -> dict[str, float]:
    """How many times faster a causal window is than all that is causal, 8 heads × 64, forward."""
    q, k, v = draw(8, 8, tokens, tokens, 64, torch.float32)
    full, part = ph.Causal(), ph.Causal() & ph.Window(size)
    times = timed(
        {
            "full": lambda: ph.attention(q, k, v, mask=full, kernel=kernel),
            "window": lambda: ph.attention(q, k, v, mask=part, kernel=kernel),
        },
        3,
    )
    ratio = times["full"] / times["window"]
    return {"tokens": tokens, "window": size, "full/window": round(ratio, 2)}


def cost_of_a_new_length() -> dict[str, float]:
    """The first call at each of 200 lengths against the second at the same length."""
    lengths = torch.randperm(2000)[:200].add(100).tolist()
    extra = []
    for length in lengths:
        q, k, v = draw(2, 1, length, length, 16, torch.float32)
        mask = ph.Causal() & ph.Window(50) & ph.KeyLengths(length - 1)
        first, second = (
            timed({"call": lambda q=q, k=k, v=v, m=mask: ph.attention(q, k, v, mask=m)}, 1)["call"]
            for _ in range(2)
        )
        extra.append(first - second)
    return {"median extra ms": round(statistics.median(extra) * 1e3, 4)}


def overhead() -> dict[str, float]:
    """Microseconds that ``attention`` adds to the very kernel that it runs, on a tiny call."""
    q, k, v = draw(4, 2, 1, 4, 16, torch.float32)
    calls = {
        "sdpa, bare": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa": lambda: ph.attention(q, k, v, kernel="sdpa"),
    }
    if (code := native.code()) is not None:
        calls |= {
            "native, bare": lambda: code.attend(q, [KVSegment(k, v)], 0.25),
            "native": lambda: ph.attention(q, k, v, kernel="native"),
        }
    times = timed(calls, 3000)
    return {
        name: round((times[name] - times[f"{name}, bare"]) * 1e6, 2)
        for name in calls
        if "bare" not in name
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter sequences")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}

    for kernel in ("tiled", "native"):
        if KERNELS[kernel].unavailable() is None:
            gain = window_gain(*((8192, 256) if quick else (32768, 1024)), kernel)
            found[f"window, {kernel}"] = gain
            print(f"a window against full causal, {kernel}", gain, flush=True)
    found["new length"] = cost_of_a_new_length()
    print("a length never seen before", found["new length"])

    found["overhead"] = overhead()
    print("overhead of attention() over the bare kernel, µs", found["overhead"])
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    report = {"machine": machine, "torch": torch.__version__, "kernels": [*KERNELS]}
    print(json.dumps(report | {"results": found}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
