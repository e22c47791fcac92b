"""Which combinations of features are judged: all of them, a covering few, each feature alone.

A cell is one choice on every axis of ``AXES``.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

AXES: dict[str, list[Any]] = {
    # name, H, G, D, V
    "heads": [
        ("MHA", 3, 3, 8, 8),
        ("GQA", 6, 2, 16, 16),
        ("MQA", 4, 1, 8, 8),
        ("GQA, values of another size", 4, 2, 24, 16),
        ("MQA, values a slice of keys", 4, 1, 40, 32),
    ],
    "mask": [
        "none",
        "causal",
        "window",
        "causal & window",
        "prefix | causal",
        "documents",
        "causal & documents",
        "key lengths",
        "keep",
        "drop",
        "not",
        "all of them",
    ],
    "bias": ["none", "ALiBi", "T5", "T5 one-sided", "tensor", "tensor per key"],
    "softcap": [None, 4.0],
    "sinks": [False, True],
    "dropout": [0.0, 0.3],
    "dtype": [torch.float32, torch.bfloat16, torch.float64, torch.float16],
    "scale": [None, 0.3],
    "memory": ["contiguous", "permuted", "expanded", "sliced", "offset", "strided"],
    "sizes": [(24, 24), (9, 41), (33, 17), (1, 29)],
    "positions": ["default", "shared", "per row"],
    "lse": [False, True],
}
MEANING = ["heads", "mask", "bias", "softcap", "sinks", "dropout"]
"""Axes whose full product the exhaustive run visits; the others turn with the cell."""


def show(cell: dict[str, Any]) -> str:
    return ", ".join(f"{axis}={value}" for axis, value in cell.items())


def every_cell() -> Iterator[dict[str, Any]]:
    """The full product of MEANING and dtype; every other axis takes a value by a fixed hash."""
    for values in itertools.product(*(AXES[axis] for axis in [*MEANING, "dtype"])):
        cell = dict(zip([*MEANING, "dtype"], values, strict=True))
        dice = random.Random(zlib.crc32(repr(values).encode()))
        yield cell | {axis: dice.choice(AXES[axis]) for axis in AXES if axis not in cell}


def covering_cells(
    seed: int = 0, within: Mapping[str, Collection[Any]] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Few cells in which every pair of values of any two axes occurs; ``within`` narrows axes."""
    dice = random.Random(seed)
    index = {
        axis: [i for i, value in enumerate(values) if value in within.get(axis, values)]
        for axis, values in AXES.items()
    }
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(index[a], index[b])
    }

    def pairs(choice: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, choice[a], b, choice[b]) for a, b in itertools.combinations(AXES, 2)}

    cells = []
    while missing:
        a, x, b, y = min(missing)
        best: dict[str, int] = {}
        most = -1
        for _ in range(30):
            choice = {axis: dice.choice(index[axis]) for axis in AXES} | {a: x, b: y}
            if (fresh := len(pairs(choice) & missing)) > most:
                best, most = choice, fresh
        missing -= pairs(best)
        cells.append({axis: AXES[axis][i] for axis, i in best.items()})
    return cells


def single_cells() -> list[dict[str, Any]]:
    """Every value alone beside plain ones, so that no refusal hides behind another."""
    plain = {axis: values[0] for axis, values in AXES.items()}
    return [
        plain | {"dtype": dtype, "lse": lse, axis: value}
        for dtype in AXES["dtype"]
        for lse in AXES["lse"]
        for axis, values in AXES.items()
        for value in values
    ]
