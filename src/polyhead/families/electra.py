"""ELECTRA (Clark et al. 2020): BERT whose embedding may be narrower than its layers.

``ForPreTraining`` is the discriminator: one number for every token, whether it was replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    HeadTransformConfig,
    TaskHeadConfig,
    TransformerConfig,
)
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    ONLY_ENCODER,
    POSITIONS,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
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


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    keys.expect("position_embedding_type", "absolute")
    size = keys.whole("embedding_size")
    replaced = HeadTransformConfig(activation=read_activation(keys))
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(
            positions="learned",
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=keys.number("hidden_dropout_prob"),
            projection=None if size == sizes.embed_dim else EmbeddingProjectionConfig(size),
        ),
        **read_head(
            keys,
            HeadTransformConfig(size, "gelu", norm=norm),
            pooled=(HeadTransformConfig(activation="gelu"),),
            own={PRE_TRAINING: TaskHeadConfig(None, 1, (replaced,))},
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    projection = config.embedding.projection
    values = {
        "position_embedding_type": "absolute",
        "embedding_size": config.embed_dim if projection is None else projection.dim,
        **write_head(config, "Electra"),
    }
    if config.task is not None and config.task.pooling is None and config.task.transforms:
        values["architectures"] = ["Electra" + PRE_TRAINING]
    return values


def table(values: Mapping[str, Any]) -> Tensors:
    """By what stands behind the last layer."""
    found, dropped = ending(values.get("architectures")), dict(POSITIONS)
    outside: tuple[Rule, ...] = {
        ANSWERS: (QA,),
        SEQUENCE: CLASSIFICATION_HEAD,
        PRE_TRAINING: (
            Rule("discriminator_predictions.dense", "task.transforms.0.dense"),
            Rule("discriminator_predictions.dense_prediction", "task.classifier"),
        ),
        MASKED: (
            Rule("generator_predictions.dense", "head.transform.dense"),
            Rule("generator_predictions.LayerNorm", "head.transform.norm"),
            *masked_rules(values, "generator_lm_head"),
        ),
    }.get(found, (CLASSIFIER,))
    if found == "Model":
        dropped[r"(generator|discriminator)_.+"] = "comes after the hidden states"
    project = Rule("embeddings_project", "embedding.projection")
    rules = (*EMBEDDINGS, project, *LAYERS)
    return Tensors(rules, prefix="electra.", outside=outside, dropped=dropped)


FAMILIES = (
    Family(
        "electra",
        "Electra",
        read,
        table,
        defaults={**DEFAULTS, "embedding_size": 128},
        write=write,
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
        # Of the multiple-choice class, which is not built.
        harmless=frozenset(
            ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
        ),
    ),
)
