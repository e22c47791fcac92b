"""Writes docs/capabilities.md: what each kernel can do, counted over cells of the matrix.

    python tools/capabilities.py [--all]      --all: every cell too (minutes), else a sample

Every count is a comparison with the float64 oracle within the error budget; a kernel that is wrong
anywhere stops the script.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import axes
import dispatch
import matrix
from polyhead.kernels import KERNELS, flex_blocks, tiled

JUDGED = [name for name in KERNELS if name != "triton"]
"""Those that are judged here; triton is interpreted on a CPU, half a second for a cell."""
PAGE = Path(__file__).parents[1] / "docs/capabilities.md"
BUDGET = "Error divided by what the budget allows (1 is the limit):"
DISPATCH = [
    "## What `auto` takes on a GPU",
    "",
    "For bfloat16, T = S = 4,096, 8 heads of 128, unless the line says otherwise",
    "(`tests/kernels/test_dispatch.py`). `auto` takes triton on compute capability 8.0, 8.6, 8.9,",
    "9.0, 10.0 and 12.0, after it has agreed with float64 on that device for that dtype and head",
    "size; the last two columns are for a device where it has not. It takes flex for the masks,",
    "biases and sizes listed in `kernels/flex.py`. Neither has run on a GPU yet: triton was tested",
    "in Triton's interpreter, the functions of flex on a CPU. Their speed has not been measured.",
]
SIGNS = {"match": "yes", "forward only": "forward", "refused": "—"}


def cells(everything: bool) -> list[dict[str, Any]]:
    covering = [cell for seed in range(20) for cell in axes.covering_cells(seed)]
    every = axes.every_cell() if everything else ()
    return [*covering, *axes.single_cells(), *every]


def name_of(axis: str, value: Any) -> str:
    if axis == "heads":
        return f"{value[0]} {value[1]}/{value[2]} × {value[3]}/{value[4]}"
    if axis == "sizes":
        return f"T = {value[0]}, S = {value[1]}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return {True: "yes", False: "no", None: "default"}.get(value, str(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true")
    everything = parser.parse_args().all
    tiled._tile_sizes = lambda q, keys: (8, 16)
    block, flex_blocks.BLOCK = flex_blocks.BLOCK, 16
    matrix.uncompile_flex()
    started, chosen = time.time(), cells(everything)
    totals: Counter[tuple[str, str]] = Counter()
    by_value: Counter[tuple[str, str, str, str]] = Counter()
    ratios: dict[Any, list[float]] = {}
    for cell in chosen:
        for kernel, verdict in matrix.judge(cell, ratios, JUDGED).items():
            kind = verdict.partition(":")[0]
            totals[kernel, kind] += 1
            for axis, value in cell.items():
                by_value[axis, name_of(axis, value), kernel, kind] += 1
    lines = [
        "# What each kernel can do",
        "",
        "Written by `python tools/capabilities.py" + (" --all`" if everything else "`") + ".",
        "A cell is one choice on every axis below. Every kernel computes it forward and backward",
        "(q, k, v, bias tensor, T5 table, ALiBi slopes, sinks) and is compared with an oracle in",
        "float64 NumPy: it matches within the error budget, matches forward only because it",
        "refuses the gradient, or refuses the call and names the feature. The tables count cells",
        "that match; a kernel that lacks a feature refuses every cell with it. The mask and score",
        "functions of flex are computed here without its compiler;",
        "`pytest -m slow tests/kernels/test_flex.py` tests it compiled, and",
        "`TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py` tests triton.",
        "",
        f"{len(chosen)} cells, {sum(totals.values())} verdicts, 0 wrong, "
        f"in {time.time() - started:.0f} s on the CPU with torch {torch.__version__}.",
        "",
        "| kernel | matches | forward only | refused | what it is good at |",
        "|---|---|---|---|---|",
    ]
    for name in JUDGED:
        counts = " | ".join(str(totals[name, kind]) for kind in SIGNS)
        lines.append(f"| {name} | {counts} | {KERNELS[name].summary} |")
    budget = ["| kernel | dtype | median | largest |", "|---|---|---|---|"]
    for (name, dtype), values in sorted(ratios.items(), key=str):
        budget.append(
            f"| {name} | {name_of('dtype', dtype)} | {statistics.median(values):.3f} | "
            f"{max(values):.3f} |"
        )
    lines += ["", BUDGET, "", *budget]
    flex_blocks.BLOCK = block  # what decides on a GPU
    lines += ["", *DISPATCH, "", *dispatch.table(dispatch.decisions(setattr))]
    for axis, values in axes.AXES.items():
        lines += ["", f"## {axis}", "", f"| {axis} | {' | '.join(JUDGED)} |"]
        lines.append("|---" * (1 + len(JUDGED)) + "|")
        for value in values:
            name = name_of(axis, value)
            row = []
            for kernel in JUDGED:
                tried = [by_value[axis, name, kernel, kind] for kind in SIGNS]
                words = f"{tried[0]} of {sum(tried)}"
                row.append(words + (f" (+{tried[1]} forward)" if tried[1] else ""))
            lines.append(f"| {name.replace('|', chr(92) + '|')} | {' | '.join(row)} |")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{PAGE}: {len(chosen)} cells")
    for name in JUDGED:
        print(f"  {name:10}", {kind: totals[name, kind] for kind in SIGNS})
    print(BUDGET, *budget, sep="\n")


if __name__ == "__main__":
    main()
