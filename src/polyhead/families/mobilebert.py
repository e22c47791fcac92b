"""MobileBERT (Sun et al. 2020): BERT whose layers compute in a narrow stream.

Its embedding reads three tokens side by side; in a batch padding counts as zeros there, as what is
beyond a text, so that a text has the result that it has alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    BottleneckAttentionConfig,
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families import bert
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    divided,
    read_activation,
    read_layer_norm,
    read_network,
)
from polyhead.families.common.steps import Transposed
from polyhead.families.common.tasks import MASKED, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

_NORM = NormConfig("affine", bias=True)


def read(keys: Keys) -> TransformerConfig:
    embed_dim, dim = keys.size("hidden_size"), keys.size("intra_bottleneck_size")
    size, num_heads = keys.size("embedding_size"), keys.size("num_attention_heads")
    keys.expect("use_bottleneck", True)
    keys.expect("true_hidden_size", dim)
    keys.expect("normalization_type", "no_norm")
    narrow = keys.flag("use_bottleneck_attention")
    if not keys.flag("key_query_shared_bottleneck") and not narrow:
        raise keys.refused("key_query_shared_bottleneck", False, "True, as queries need it")
    if size > embed_dim:
        raise keys.refused("embedding_size", size, f"1 to hidden_size={embed_dim}")
    network = read_network(keys, gated=False, bias=True)
    heads = BottleneckAttentionConfig(
        num_heads,
        num_heads,
        divided(keys, dim, num_heads),
        qkv_bias=True,
        out_bias=True,
        dropout=keys.number("attention_probs_dropout_prob"),
        dim=dim,
        norm=_NORM,
        networks=(network,) * _networks(keys),
        values_from_wide=not narrow,
    )
    layer = LayerConfig(
        heads, None, _NORM, norm_placement="post", dropout=keys.number("hidden_dropout_prob")
    )
    near = 1 if keys.flag("trigram_input") else 0
    projected = near or size != embed_dim
    embedding = EmbeddingConfig(
        positions="learned",
        num_segments=keys.whole("type_vocab_size"),
        norm=_NORM,
        dropout=keys.number("hidden_dropout_prob"),
        projection=(
            EmbeddingProjectionConfig(size, "tokens", neighbours=near) if projected else None
        ),
    )
    head = read_head(
        keys,
        HeadTransformConfig(None, read_activation(keys), norm=read_layer_norm(keys)),
        pooled=(bert.POOLER,) if keys.flag("classifier_activation") else (),
    )
    if head["head"] is not None:
        head["head_beside"] = embed_dim - size
    return bert.read_encoder(
        keys,
        (layer,) * keys.num_layers("num_hidden_layers"),
        max_positions=keys.whole("max_position_embeddings"),
        embedding=embedding,
        **head,
    )


def _networks(keys: Keys) -> int:
    if (count := keys.size("num_feedforward_networks")) > _MOST:
        raise keys.refused("num_feedforward_networks", count, f"1 to {_MOST}")
    return count


def write(config: TransformerConfig) -> dict[str, Any]:
    heads: Any = config.layers[0].attention
    projection, transforms = config.embedding.projection, config.head_transforms
    network = heads.networks[0]
    values = {
        "intra_bottleneck_size": heads.dim,
        "use_bottleneck_attention": not heads.values_from_wide,
        "num_feedforward_networks": len(heads.networks),
        "intermediate_size": network.hidden_dim,
        "hidden_act": write_activation(network.activation),
        "embedding_size": config.embed_dim if projection is None else projection.dim,
        "trigram_input": projection is not None and projection.neighbours > 0,
        "layer_norm_eps": _EPS,
        **write_head(config, "MobileBert"),
    }
    if transforms and transforms[0].norm is not None:
        values["layer_norm_eps"] = transforms[0].norm.eps
    if config.task is not None and config.task.pooling is not None:
        values["classifier_activation"] = bool(config.task.transforms)
    return values


def table(values: Mapping[str, Any]) -> Tensors:
    values = {**DEFAULTS, **values}
    last = values["num_feedforward_networks"] - 1
    rules = [*_LAYERS, *_network("", last)]
    for i in range(last):
        rules += _network(f"ffn.{i}.", i)
    dropped = dict(HEADS.dropped)
    if values["embedding_size"] == values["hidden_size"]:
        dropped[r"cls\.predictions\.dense\.weight"] = "of no columns"
        if not values["trigram_input"]:
            dropped[r"embeddings\.embedding_transformation\..+"] = "nothing reads it"
    if values["use_bottleneck_attention"]:
        dropped[r"encoder\.layer\.\d+\.bottleneck\.attention\..+"] = "nothing reads it"
    rules = [*bert.EMBEDDINGS, *rules]
    return replace(HEADS, dropped=dropped).table(values, tuple(rules), "mobilebert.")


def _network(theirs: str, number: int) -> tuple[Rule, ...]:
    return under(
        f"encoder.layer.{{i}}.{theirs}",
        f"layers.{{i}}.attention.networks.{number}.",
        {
            "intermediate.dense": "feed_forward.up_proj",
            "output.dense": "feed_forward.down_proj",
            "output.LayerNorm": "norm",
        },
    )


_LAYERS = (
    Rule("embeddings.embedding_transformation", "embedding.projection"),
    *under(
        "encoder.layer.{i}.",
        "layers.{i}.",
        {
            "attention.self.query": "attention.q_proj",
            "attention.self.key": "attention.k_proj",
            "attention.self.value": "attention.v_proj",
            "attention.output.dense": "attention.o_proj",
            "attention.output.LayerNorm": "attention.heads_norm",
            "bottleneck.input.dense": "attention.narrow.dense",
            "bottleneck.input.LayerNorm": "attention.narrow.norm",
            "bottleneck.attention.dense": "attention.for_scores.dense",
            "bottleneck.attention.LayerNorm": "attention.for_scores.norm",
            "output.bottleneck.dense": "attention.wide_proj",
            "output.bottleneck.LayerNorm": "attention_norm",
        },
    ),
)
HEADS = replace(
    bert.HEADS,
    masked=(
        *bert.PREDICTIONS,
        Rule("cls.predictions.dense.weight", "head.beside", Transposed()),
    ),
)
_EPS, _MOST = 1e-12, 1000
DEFAULTS: Mapping[str, Any] = {
    **bert.DEFAULTS,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.0,
    "layer_norm_eps": _EPS,
    "embedding_size": 128,
    "trigram_input": True,
    "use_bottleneck": True,
    "intra_bottleneck_size": 128,
    "use_bottleneck_attention": False,
    "key_query_shared_bottleneck": True,
    "num_feedforward_networks": 4,
    "normalization_type": "no_norm",
    "classifier_activation": True,
}

FAMILIES = (
    Family(
        "mobilebert",
        "MobileBert",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
    ),
)
