"""RoBERTa (Liu et al. 2019) and its sisters in other languages, XLM-RoBERTa and CamemBERT.

BERT's layers. Positions count from the padding token's id plus one, and the classes of a text come
from a head of their own in place of the pooler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polyhead.config import EmbeddingConfig, HeadTransformConfig, TransformerConfig
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    NO_POOLER,
    ONLY_ENCODER,
    POOLER,
    POSITIONS,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import (
    ANSWERS,
    CLASSIFICATION_HEAD,
    CLASSIFIER,
    MASKED,
    PRE_TRAINING,
    QA,
    SEQUENCE,
    ending,
    masked_rules,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors

OTHER_BIAS = {r"lm_head\.bias": "only the decoder's is added, where it has its own"}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    keys.expect("position_embedding_type", "absolute")
    offset = keys.whole("pad_token_id") + 1
    if not 0 < offset < sizes.max_positions:
        wanted = f"0 to max_position_embeddings={sizes.max_positions} - 2"
        raise keys.refused("pad_token_id", offset - 1, wanted)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions - offset,
        embedding=EmbeddingConfig(
            positions="learned",
            position_offset=offset,
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=keys.number("hidden_dropout_prob"),
        ),
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


def language_model(values: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The head of masked tokens."""
    return (
        Rule("lm_head.dense", "head.transform.dense"),
        Rule("lm_head.layer_norm", "head.transform.norm"),
        *masked_rules(values, "lm_head.decoder", "lm_head.bias"),
    )


def table(
    values: Mapping[str, Any],
    rules: tuple[Rule, ...] = (*EMBEDDINGS, *LAYERS),
    prefix: str = "roberta.",
) -> Tensors:
    """By what stands behind the last layer."""
    found, dropped = ending(values.get("architectures")), POSITIONS | NO_POOLER
    outside = {ANSWERS: (QA,), SEQUENCE: CLASSIFICATION_HEAD}.get(found, (CLASSIFIER,))
    if found == MASKED:
        outside = language_model(values)
        if not values.get("tie_word_embeddings", True):
            dropped |= OTHER_BIAS
    elif found == "Model":
        dropped |= {r"lm_head\..+": "comes after the hidden states"}
    return Tensors(rules, prefix=prefix, outside=outside, dropped=dropped)


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
