"""LUKE (Yamada et al. 2020): RoBERTa that also reads entities, with queries of their own.

Calls take no entities, so what reads them is left out: a text is computed as in transformers where
no entities are given. Classes of entities are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families import roberta
from polyhead.families.bert import EMBEDDINGS, LAYERS, POOLER_RULE, POSITIONS
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.tasks import CLASSIFIER, MASKED
from polyhead.families.common.tensors import Tensors


def read(keys: Keys) -> TransformerConfig:
    config = roberta.read(keys)
    # transformers ties the head's bias alone, and never its matrix.
    return config if config.head is None else replace(config, head="untied")


def write(config: TransformerConfig) -> dict[str, Any]:
    written = roberta.write("Luke", config)
    del written["position_embedding_type"]
    return {**written, "entity_vocab_size": 1}  # as few as there can be: none are saved


_NO_ENTITIES = "reads entities, which calls do not have"
HEADS = replace(
    roberta.HEADS,
    bias=None,
    texts=(CLASSIFIER,),
    pooled=POOLER_RULE,
    beside={
        r"entity_predictions\..+": _NO_ENTITIES,
        r"lm_head\.bias": "a copy of the decoder's, which alone is added",
    },
    others=r"(lm_head|entity_predictions)\..+",
    dropped={
        **POSITIONS,
        r"entity_embeddings\..+": _NO_ENTITIES,
        r"encoder\.layer\.\d+\.attention\.self\.(w2e|e2w|e2e)_query\..+": _NO_ENTITIES,
    },
)


def table(values: Mapping[str, Any]) -> Tensors:
    untied = {**values, "tie_word_embeddings": False}
    return HEADS.table(untied, (*EMBEDDINGS, *LAYERS), "luke.")


FAMILIES = (
    Family(
        "luke",
        "Luke",
        read,
        table,
        defaults=roberta.FAIRSEQ,
        write=write,
        with_head=MASKED,
        harmless=frozenset(("entity_vocab_size", "entity_emb_size", "use_entity_aware_attention")),
    ),
)
