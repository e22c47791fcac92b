"""RoFormer (Su et al. 2021): BERT with rotary positions, whose embedding may be narrower than its
layers. With ``is_decoder`` it is causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    HeadTransformConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    PREDICTIONS,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.steps import RotaryPairs
from polyhead.families.common.tasks import (
    ANSWERS,
    CAUSAL,
    CLASSIFICATION_HEAD,
    MASKED,
    SEQUENCE,
    TOKENS,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    size, causal = keys.size("embedding_size", sizes.embed_dim), keys.flag("is_decoder")
    activation = read_activation(keys)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm, rope=RopeConfig()),
        kind="decoder" if causal else "encoder",
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=keys.number("hidden_dropout_prob"),
            projection=None if size == sizes.embed_dim else EmbeddingProjectionConfig(size),
        ),
        **read_head(
            keys,
            HeadTransformConfig(size, activation, norm=norm),
            pooled=(HeadTransformConfig(activation=activation),),
            logits=CAUSAL if causal else MASKED,
            without=(SEQUENCE, TOKENS, ANSWERS) if causal else (),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    projection, causal = config.embedding.projection, config.kind == "decoder"
    values = {
        "embedding_size": config.embed_dim if projection is None else projection.dim,
        "is_decoder": causal,
        **write_head(config, "RoFormer"),
    }
    if causal and config.head is not None:
        values["architectures"] = ["RoFormer" + CAUSAL]
    return values


_TURNED = ("attention.self.query", "attention.self.key")
RULES = (
    *(rule for rule in EMBEDDINGS if "position" not in rule.theirs),
    Rule("embeddings_project", "embedding.projection"),
    *(
        rule.with_(rule.theirs, RotaryPairs()) if rule.theirs.endswith(_TURNED) else rule
        for rule in LAYERS
    ),
)
HEADS = Heads(
    "cls.predictions.decoder",
    "cls.predictions.bias",
    PREDICTIONS,
    texts=CLASSIFICATION_HEAD,
    others=r"cls\..+",
    dropped={r"encoder\.embed_positions\.weight": "the sinusoids that turn queries and keys"},
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, RULES, "roformer.")


FAMILIES = (
    Family(
        "roformer",
        "RoFormer",
        read,
        table,
        defaults={**DEFAULTS, "embedding_size": None, "is_decoder": False},
        write=write,
        with_head=MASKED,
        not_supported={
            "rotary_value": "values are turned by their positions too",
            "add_cross_attention": "only self-attention is built",
        },
    ),
)
