"""RemBERT (Chung et al. 2020): BERT with a narrow input embedding and a wide output embedding.

The two are never tied: masked tokens are read from states of the output embedding's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingProjectionConfig, HeadTransformConfig, TransformerConfig
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    ONLY_ENCODER,
    POOLER,
    POOLER_RULE,
    POSITIONS,
    read_embedding,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import MASKED, Heads, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under

_UNTIED = {"tie_word_embeddings": False}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    projection = EmbeddingProjectionConfig(keys.size("input_embedding_size"))
    output = keys.size("output_embedding_size")
    head = read_head(
        keys, HeadTransformConfig(output, read_activation(keys), norm=norm), pooled=(POOLER,)
    )
    if head["head"] is not None:
        head["head"] = "untied"  # whatever tie_word_embeddings says
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, norm, projection=projection),
        **head,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    projection, transforms = config.embedding.projection, config.head_transforms
    if projection is None:
        raise AttributeError("RemBERT projects its embedding")
    dim = _DEFAULTS["output_embedding_size"] if not transforms else transforms[0].dim
    return {
        "position_embedding_type": "absolute",
        "input_embedding_size": projection.dim,
        "output_embedding_size": dim,
        **write_head(config, "RemBert"),
        **_UNTIED,
    }


HEADS = Heads(
    "cls.predictions.decoder",
    masked=under(
        "cls.predictions.",
        "head.transforms.0.",
        {"dense": "dense", "LayerNorm": "norm"},
    ),
    pooled=POOLER_RULE,
    others=r"cls\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    project = Rule("encoder.embedding_hidden_mapping_in", "embedding.projection")
    return HEADS.table({**values, **_UNTIED}, (*EMBEDDINGS, project, *LAYERS), "rembert.")


_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    **_UNTIED,
    "input_embedding_size": 256,
    "output_embedding_size": 1664,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "bos_token_id": 312,
    "eos_token_id": 313,
}

FAMILIES = (
    Family(
        "rembert",
        "RemBert",
        read,
        table,
        defaults=_DEFAULTS,
        write=write,
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
        harmless=frozenset(("classifier_dropout_prob",)),
    ),
)
