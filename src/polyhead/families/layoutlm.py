"""LayoutLM (Xu et al. 2019): BERT whose tokens also have a box on a page.

Calls take no boxes: every token has the box 0, 0, 0, 0, as in transformers where none are given.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from polyhead.config import FirstRowConfig, TransformerConfig
from polyhead.families import bert
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.tasks import MASKED
from polyhead.families.common.tensors import under

_TABLES = {"x": 2, "y": 2, "h": 1, "w": 1}
"""How many numbers of a box each table is read for: left and right, top and bottom, the sizes."""


def read(keys: Keys) -> TransformerConfig:
    rows = keys.size("max_2d_position_embeddings")
    return bert.read(
        keys, first_rows=tuple(FirstRowConfig(rows, times) for times in _TABLES.values())
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {
        **bert.write("LayoutLM", config),
        "max_2d_position_embeddings": config.embedding.first_rows[0].rows,
    }


_BOXES = under(
    "embeddings.",
    "embedding.",
    {f"{name}_position_embeddings": f"first_rows.{i}" for i, name in enumerate(_TABLES)},
)

FAMILIES = (
    Family(
        "layoutlm",
        "LayoutLM",
        read,
        partial(bert.table, (*bert.LAYERS, *_BOXES), "layoutlm."),
        defaults={**bert.DEFAULTS, "max_2d_position_embeddings": 1024},
        write=write,
        with_head=MASKED,
    ),
)
