"""I-BERT (Kim et al. 2021): RoBERTa that can compute in integers; here in floating point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families import roberta
from polyhead.families.bert import DEFAULTS, LAYERS
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.tasks import MASKED
from polyhead.families.common.tensors import Tensors

_INTEGERS = r".+\.(\w+_integer|\w+_scaling_factor|x_min|x_max|shift)"


def read(keys: Keys) -> TransformerConfig:
    keys.expect("hidden_act", "gelu")
    return roberta.read(keys)


def table(values: Mapping[str, Any]) -> Tensors:
    found = roberta.table(LAYERS, "ibert.", values)
    return replace(found, dropped={**found.dropped, _INTEGERS: "only integers are computed by it"})


FAMILIES = (
    Family(
        "ibert",
        "IBert",
        read,
        table,
        defaults={**DEFAULTS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        write=partial(roberta.write, "IBert"),
        with_head=MASKED,
        not_supported={"quant_mode": "only floating point is computed, not integers"},
        harmless=frozenset(("force_dequant",)),
    ),
)
