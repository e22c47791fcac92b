"""Four heads before, during and after a training: makes ``training.json``.

    python -m polyhead.viewer.lesson.training          # seconds; one seeded run

The task is that of ``polyhead compare heads`` (``lab/comparison/heads.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from polyhead._utils.atomic_write import write_file
from polyhead.lab.comparison.heads import heads_in_training

HEADS, SEED = 4, 0
AFTER = (0, 50, 100, 200, 400)
_CORNER = 8
"""Rows and columns of W_Q that are shown."""


def measure() -> list[dict[str, Any]]:
    """Each moment of ``AFTER``: the loss, where the heads look, a corner of a head's W_Q."""
    return [
        {
            "step": each["step"],
            "loss": round(each["loss"], 3),
            "maps": _rounded(each["weights"], 2),
            "w_q": _rounded(each["w_q"][:_CORNER, :_CORNER], 3),
        }
        for each in heads_in_training(HEADS, SEED, AFTER)
    ]


def _rounded(values: Tensor, digits: int) -> Any:
    rounded = (values.double() * 10**digits).round() / 10**digits
    return rounded.tolist()


if __name__ == "__main__":
    write_file(Path(__file__).with_name("training.json"), json.dumps(measure()) + "\n")
