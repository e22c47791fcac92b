"""RoBERTa (Liu et al. 2019), and XLM-RoBERTa and CamemBERT for other languages.

BERT's layers. Positions count from the padding token's id plus one, and the classes of a text come
from a head of their own in place of the pooler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polyhead.config import HeadTransformConfig, TransformerConfig
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    ONLY_ENCODER,
    POOLER,
    POSITIONS,
    read_embedding,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import (
    CLASSIFICATION_HEAD,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    offset = keys.whole("pad_token_id") + 1
    if not 0 < offset < sizes.max_positions:
        wanted = f"0 to max_position_embeddings={sizes.max_positions} - 2"
        raise keys.refused("pad_token_id", offset - 1, wanted)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions - offset,
        embedding=read_embedding(keys, norm, position_offset=offset),
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=norm),
            pooled=(POOLER,),
            without=(PRE_TRAINING,),
        ),
    )


def write(class_name: str, config: TransformerConfig) -> dict[str, Any]:
    return {
        "position_embedding_type": "absolute",
        "max_position_embeddings": config.max_positions + config.embedding.position_offset,
        **write_head(config, class_name),
    }


HEADS = Heads(
    "lm_head.decoder",
    "lm_head.bias",
    (
        Rule("lm_head.dense", "head.transform.dense"),
        Rule("lm_head.layer_norm", "head.transform.norm"),
    ),
    texts=CLASSIFICATION_HEAD,
    others=r"lm_head\..+",
    dropped=POSITIONS | {r"pooler\.dense\.(weight|bias)": "comes after the hidden states"},
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, (*EMBEDDINGS, *LAYERS), "roberta.")


FAMILIES = tuple(
    Family(
        model_type,
        class_name,
        read,
        table,
        defaults={**DEFAULTS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        write=partial(write, class_name),
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
    )
    for model_type, class_name in (
        ("roberta", "Roberta"),
        ("xlm-roberta", "XLMRoberta"),
        ("camembert", "Camembert"),
    )
)
