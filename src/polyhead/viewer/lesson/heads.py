"""One head against four on the task of ``polyhead compare heads``: makes ``heads.json``.

    python -m polyhead.viewer.lesson.heads          # some minutes: 30 models are trained

The shares are those of the command (docs/comparing.md, "How many heads?"); the maps are where the
heads of its first seed look on one row of random tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyhead._utils.atomic_write import write_file
from polyhead.lab.comparison.heads import HEADS, summary, sweep, where_heads_look

SEEDS = 5
SHOWN = (1, 4)
"""Numbers of heads whose maps the lesson shows."""


def measure() -> dict[str, Any]:
    """Trains the models and says what they can do and where they look."""
    rows = [
        {"heads": row["heads"], "each": round(row["each"], 4), "all": round(row["all"], 4),
         "least": round(row["all_least"], 4), "most": round(row["all_most"], 4)}
        for row in summary(sweep(HEADS, SEEDS))
    ]  # fmt: skip
    return {"rows": rows} | look()


def look() -> dict[str, Any]:
    """The maps of ``SHOWN``, and the tokens that they are of."""
    maps, tokens = {}, []
    for heads in SHOWN:
        ids, weights = where_heads_look(heads, 0)
        tokens.append(ids.tolist())
        maps[heads] = [[[round(x, 3) for x in row] for row in head] for head in weights.tolist()]
    return {"maps": maps, "tokens": tokens}


if __name__ == "__main__":
    write_file(Path(__file__).with_name("heads.json"), json.dumps(measure()) + "\n")
