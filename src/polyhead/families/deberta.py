"""DeBERTa (He et al. 2021): BERT whose scores depend on content by distance.

The second version, which has keys of its own, is in ``deberta_v2.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    DisentangledAttentionConfig,
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    HeadTransformConfig,
    NormConfig,
    RelativeEmbeddingConfig,
    TransformerConfig,
)
from polyhead.families import bert
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    ACTIVATIONS,
    Sizes,
    read_activation,
    read_layer_norm,
    read_mha_sizes,
)
from polyhead.families.common.steps import QKVPerGroup
from polyhead.families.common.tasks import (
    CLASSIFIER,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

TERMS = "c2p", "p2c"


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    return read_with(keys, sizes, norm, own_projections=True, k_bias=False)


def read_with(
    keys: Keys,
    sizes: Sizes,
    norm: NormConfig,
    *,
    buckets: int = -1,
    norm_of_distances: NormConfig | None = None,
    own_projections: bool,
    **heads: Any,
) -> TransformerConfig:
    """The configuration, of what both versions have and what one may add."""
    said = keys.take("pos_att_type")
    names = said.lower().split("|") if isinstance(said, str) else keys.texts("pos_att_type", [])
    terms = {name.strip() for name in names}
    heads["scale"] = 1 / math.sqrt(sizes.head_dim * (1 + len(terms)))
    far = keys.whole("max_relative_positions")
    far = far if far > 0 else sizes.max_positions
    dropout, distances = keys.number("hidden_dropout_prob"), None
    if not terms.issubset(TERMS) or (not terms and keys.flag("relative_attention")):
        raise keys.refused("pos_att_type", said, "c2p, p2c or both")
    if keys.flag("relative_attention"):
        count, shared = (2 * buckets, far) if buckets > 0 else (2 * far, None)
        distances = RelativeEmbeddingConfig(count, shared, norm_of_distances, dropout)
        heads |= {
            "kind": DisentangledAttentionConfig,
            "num_distances": count,
            "query_term": "c2p" in terms,
            "key_term": "p2c" in terms,
            "own_projections": own_projections,
        }
    size = keys.size("embedding_size", None) or sizes.embed_dim
    own = None if size == sizes.embed_dim else size
    projection = None if own is None else EmbeddingProjectionConfig(own, "raw_sum", bias=False)
    keys.expect("pooler_hidden_size", sizes.embed_dim)
    pooler = HeadTransformConfig(activation=keys.choice("pooler_hidden_act", ACTIVATIONS))
    before_logits = HeadTransformConfig(own, read_activation(keys), norm=norm)
    head = read_head(keys, before_logits, pooled=(pooler,), without=(PRE_TRAINING,))
    if not keys.flag("legacy") and head["head"]:  # always with the embedding's matrix
        head |= {"head": "tied", "head_transforms": (replace(before_logits, dim=sizes.embed_dim),)}
    return bert.read_encoder(
        keys,
        bert.read_layers(keys, sizes, norm, **heads),
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(
            positions="learned" if keys.flag("position_biased_input") else None,
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=dropout,
            projection=projection,
        ),
        relative_embedding=distances,
        **head,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return write_with(config, "Deberta")


def write_with(config: TransformerConfig, class_name: str) -> dict[str, Any]:
    """The inverse of ``read_with``, beyond ``write_common``."""
    heads: Any = config.layers[0].attention
    distances, projection = config.relative_embedding, config.embedding.projection
    before_logits = config.head_transforms
    if distances is None:
        terms = list(TERMS[: round(1 / (heads.scale**2 * heads.head_dim)) - 1])
        far = -1
    else:
        used = heads.query_term, heads.key_term
        terms = [name for name, there in zip(TERMS, used, strict=True) if there]
        far = distances.max_distance or distances.num_distances // 2
    pooler: dict[str, Any] = {}
    if config.task is not None and config.task.pooling is not None and config.task.transforms:
        pooler["pooler_hidden_act"] = write_activation(
            config.task.transforms[0].activation or "gelu"
        )
    return {
        "relative_attention": distances is not None,
        "pos_att_type": terms,
        "max_relative_positions": far,
        "position_biased_input": config.embedding.positions is not None,
        "embedding_size": config.embed_dim if projection is None else projection.dim,
        # Both mean the same; a size that is stated tells which one the file was.
        "legacy": not before_logits or before_logits[0].dim != config.embed_dim,
        **pooler,
        **write_head(config, class_name),
    }


_EMBEDDINGS = (
    *bert.EMBEDDINGS,
    Rule("embeddings.embed_proj", "embedding.projection"),
    Rule("encoder.rel_embeddings", "relative_embedding.distances"),
)
_OUTPUTS = {
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "feed_forward.up_proj",
    "output.dense": "feed_forward.down_proj",
    "output.LayerNorm": "feed_forward_norm",
}
_HEADS = Heads(
    "cls.predictions.decoder",
    "cls.predictions.bias",
    bert.PREDICTIONS,
    texts=(Rule("pooler.dense", "task.transforms.0.dense"), CLASSIFIER),
    others=r"(cls|lm_predictions|mask_predictions)\..+",
    dropped=bert.POSITIONS,
)
_LATER = {
    MASKED: under(
        "lm_predictions.lm_head.",
        "head.",
        {"dense": "transforms.0.dense", "LayerNorm": "transforms.0.norm", "bias": "bias"},
    )
}
"""Where files with ``legacy`` false keep that head, whose matrix is the embedding's."""


def table_of(values: Mapping[str, Any], *attention: Rule) -> Tensors:
    """The table of both versions, by where a layer's file keeps its heads' projections."""
    rules = (*_EMBEDDINGS, *under("encoder.layer.{i}.", "layers.{i}.", _OUTPUTS), *attention)
    heads = _HEADS if values.get("legacy", True) else replace(_HEADS, own=_LATER)
    return heads.table(values, rules, "deberta.")


def table(values: Mapping[str, Any]) -> Tensors:
    there, here = "encoder.layer.{i}.attention.self.", "layers.{i}.attention."
    fused = tuple(f"{here}{name}_proj.weight" for name in "qkv")
    heads = (
        Rule(f"{there}in_proj.weight", fused, QKVPerGroup()),
        Rule(f"{there}q_bias", f"{here}q_proj.bias"),
        Rule(f"{there}v_bias", f"{here}v_proj.bias"),
        Rule(f"{there}pos_proj", f"{here}distance_k_proj"),
        Rule(f"{there}pos_q_proj", f"{here}distance_q_proj"),
    )
    return table_of(values, *heads)


DEFAULTS: Mapping[str, Any] = {
    **bert.DEFAULTS,
    "layer_norm_eps": 1e-7,
    "type_vocab_size": 0,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_biased_input": True,
    "pos_att_type": None,
    "pooler_hidden_act": "gelu",
    "legacy": True,
}
HARMLESS = frozenset(("pooler_dropout", "cls_dropout"))

FAMILIES = (
    Family(
        "deberta",
        "Deberta",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
        harmless=HARMLESS,
        not_supported={"talking_head": "heads are not mixed"},
    ),
)
