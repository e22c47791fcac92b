"""ELECTRA (Clark et al. 2020): BERT whose embedding may be narrower than its layers.

``ForPreTraining`` is the discriminator: one number for every token, whether it was replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
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
    read_embedding,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
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
    size = keys.whole("embedding_size")
    projection = None if size == sizes.embed_dim else EmbeddingProjectionConfig(size)
    replaced = HeadTransformConfig(activation=read_activation(keys))
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, norm, projection=projection),
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


HEADS = Heads(
    "generator_lm_head",
    masked=(
        Rule("generator_predictions.dense", "head.transforms.0.dense"),
        Rule("generator_predictions.LayerNorm", "head.transforms.0.norm"),
    ),
    texts=CLASSIFICATION_HEAD,
    own={
        PRE_TRAINING: (
            Rule("discriminator_predictions.dense", "task.transforms.0.dense"),
            Rule("discriminator_predictions.dense_prediction", "task.classifier"),
        )
    },
    others=r"(generator|discriminator)_.+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    project = Rule("embeddings_project", "embedding.projection")
    return HEADS.table(values, (*EMBEDDINGS, project, *LAYERS), "electra.")


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
        # Keys of the multiple-choice class, which is not built.
        harmless=frozenset(
            ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
        ),
    ),
)
