"""Products of a prompt's rows with weights, beside torch's and the registers' rate.

    python benchmarks/products.py [--rows 256 1024] [--threads 2] [--seconds 1]
    python benchmarks/products.py --types Q4_K Q2_K [...] [--rows 1 8 256], or --types all

The shapes are those of SmolLM2-135M (576 features, 1,536 hidden ones) and a larger layer. Numbers
in float32 and bfloat16, blocks of 4 bits (Q4_1) with either, and blocks whose activations are
rounded to 8 bits, of which the limit is that of 8-bit integers. Each result is compared with
float64 first; all are timed in turns. The last line is JSON: GFLOP/s, and the fraction of the
registers' rate. ``--types`` times every type of blocks with x in float32 and in 8 bits, 2,048
features and as many outputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from polyhead import native
from polyhead.models.int8_activations import rounding_types
from polyhead.native import rates
from polyhead.native.arguments import INT8_ACTIVATIONS, Weight
from polyhead.quantization import block_type, readable
from polyhead.quantization.packing import pack
from polyhead.quantization.scaled import is_scaled
from polyhead.quantization.unpacking import unpack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from random_blocks import by_package, random_blocks

SHAPES = ((576, 1536), (1536, 576), (2048, 2048))
WAYS = (
    ("float32", torch.float32, False, False),
    ("bfloat16", torch.bfloat16, False, False),
    ("Q4_1, float32", torch.float32, True, False),
    ("Q4_1, bfloat16", torch.bfloat16, True, False),
    ("Q4_1, activations in 8 bits", torch.float32, True, True),
)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--seconds", type=float, default=1.0, help="of each product; default: 1")
    options.add_argument("--types", nargs="+", help="of blocks, or all: float32 beside 8 bits")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        found = (of_types if args.types else of_shapes)(args)
    facts = {"machine": platform.machine(), "threads": args.threads, "seconds": args.seconds}
    print(json.dumps(facts | {"products": found}))


def of_shapes(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = {}
    for rows in args.rows:
        for inputs, outputs in SHAPES:
            for name, dtype, blocks, int8 in WAYS:
                x = torch.randn(rows, inputs).to(dtype)
                weight = torch.randn(outputs, inputs) / inputs**0.5
                made = measured(x, weight, blocks, int8, args.seconds)
                label = f"{rows} × {inputs} × {outputs}, {name}"
                found[label] = made
                print(
                    f"{label}: {made['rate']:.0f} GFLOP/s, {made['of_limit']:.0%};"
                    f" torch {made['torch']:.0%}",
                    flush=True,
                )
    return found


def measured(
    x: Tensor, weight: Tensor, blocks: bool, int8: bool, seconds: float
) -> dict[str, float]:
    """GFLOP/s, and of the registers' rate what we and torch reach."""
    code = native.code(x.dtype)
    if code is None:
        raise SystemExit(f"no native code here: {native.unavailable()}")
    kind = block_type("Q4_1")
    ours = Weight(weight.to(x.dtype), None)
    if blocks:
        packed = pack(weight, kind)
        weight = unpack(packed, kind)
        ours = Weight(packed, None, kind.number + (INT8_ACTIVATIONS if int8 else 0))
    theirs = weight.to(x.dtype)
    operations = 2.0 * x.shape[0] * weight.numel()
    instruction = rates.instructions(torch.int8 if int8 else x.dtype)[-1]
    done = rates.compute(instruction, operations)
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: code.product(x, [ours], batch_invariant=False),
        "torch": lambda: torch.nn.functional.linear(x, theirs),
        "limit": lambda: rates.compute(instruction, operations),
    }
    exact = x.double() @ weight.double().mT
    y = code.product(x, [ours], batch_invariant=False).double()
    error = (y - exact).norm() / exact.norm()
    if not error <= (0.02 if int8 else 0.01):
        raise SystemExit(f"{instruction}: an error of {error:.1e}")
    median = in_turns(runs, seconds)
    limit = median["limit"] * operations / done
    return {
        "rate": operations / median["ours"] / 1e9,
        "of_limit": limit / median["ours"],
        "torch": limit / median["torch"],
    }


def in_turns(runs: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Medians of the seconds that each takes."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 3:
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in taken.items()}


def of_types(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """GFLOP/s with x in float32, and in 8 bits."""
    code = native.code()
    if code is None:
        raise SystemExit(f"no native code here: {native.unavailable()}")
    known = {kind.name: kind for kind in rounding_types(code) if not is_scaled(kind)}
    found = {}
    for name in known if args.types == ["all"] else args.types:
        if name not in known:
            raise SystemExit(f"--types must be all, or of {', '.join(known)}: got {name}")
        kind = known[name]
        if not readable(code, kind):
            raise SystemExit(f"the native code misreads {name}")
        blocks = random_blocks(kind, 2048, 2048)
        for rows in args.rows:
            x = torch.randn(rows, 2048)
            runs = {
                way: partial(code.product, x, [Weight(blocks, None, kind.number + number)])
                for way, number in (("float32", 0), ("8 bits", INT8_ACTIVATIONS))
            }
            exact = x.double() @ by_package(blocks, kind).double().mT
            for run, most in zip(runs.values(), (1e-5, 0.02), strict=True):
                error = (run().double() - exact).norm() / exact.norm()
                if not error <= most:
                    raise SystemExit(f"{name}, {rows} rows: an error of {error:.1e}")
            taken = in_turns(runs, args.seconds)
            reached = {way: 2.0 * rows * 2048**2 / taken[way] / 1e9 for way in runs}
            found[f"{name}, {rows}"] = reached
            each = ", ".join(f"{rate:.0f} GFLOP/s in {way}" for way, rate in reached.items())
            ratio = reached["8 bits"] / reached["float32"]
            print(f"{name}, {rows} rows: {each}: {ratio:.2f} ×", flush=True)
    return found


if __name__ == "__main__":
    main()
