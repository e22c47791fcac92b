"""The answers of the exercises: three for each scene, in the order of ``ask1`` to ``ask3``."""

from __future__ import annotations

import math
from typing import Any

from polyhead.interpret.trace.steps import example_trace
from polyhead.planning import plan, tiled_pairs


def exercises(heads: dict[str, Any], real: dict[str, Any], training: list[dict[str, Any]]) -> Any:
    """Answers by the name of the scene; whole numbers are asked for exactly.

    Args:
        heads: ``heads.json``.
        real: ``real.json``.
        training: ``training.json``.
    """
    steps = example_trace("en")
    (two,) = (row for row in heads["rows"] if row["heads"] == 2)
    cached = {row.name: row.elements for row in plan("deepseek-v2", tokens=1024).layouts}
    mla, mha = cached["MLA"], cached["MHA"]
    e2 = math.exp(2)
    return {
        "qkv": [1 * 1 + 2 * 3, 512 // 8, 512 * 512],
        "scores": [_rounded((1 * 3 + 2 * 1) / math.sqrt(2)), 0.25, _rounded(e2 / (e2 + 1))],
        "example": [
            _rounded(float(steps["head1.A"].values[1, 0])),
            _rounded(float(steps["output"].values[0, 0])),
            3 * 2 * 2,
        ],
        "heads": [64 // 4, 4 * 16 * 16, _rounded(100 * two["all"])],
        "masks": [6 * 5 // 2, 4, 1],
        "positions": [1, 2, _rounded(math.cos(2))],
        "cross": [3 * 4, 3, 4],
        "cache": [
            2 * 32 * 128,
            32 // 8,
            2 * real["kv_heads"] * real["size"] * real["layers"] * 2,
        ],
        "flash": [
            tiled_pairs(2048, tile=128, ahead=None) // 128**2,
            tiled_pairs(2048, tile=128, ahead=0) // 128**2,
            _rounded(math.exp(-1)),
        ],
        "training": [
            _rounded(math.log(32)),
            _rounded(0.5 - 0.1 * 2),
            next(each["step"] for each in training if each["loss"] < 1),
        ],
        "layers": [4 * 64 * 64, 10 * 64, 2],
        "table": [mla, mha, _rounded(mha / mla)],
    }


def _rounded(x: float) -> float:
    return round(x, 3)
