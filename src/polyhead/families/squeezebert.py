"""SqueezeBERT (Iandola et al. 2020): BERT's layers with grouped projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    GroupedAttentionConfig,
    GroupedFeedForwardConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    POOLER,
    POOLER_RULE,
    POSITIONS,
    PREDICTIONS,
    read_embedding,
    read_encoder,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tasks import MASKED, Heads, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors

_GROUPS = {
    "q_groups": "q_groups",
    "k_groups": "k_groups",
    "v_groups": "v_groups",
    "post_attention_groups": "o_groups",
}
_OF_NETWORK = {"intermediate_groups": "up_groups", "output_groups": "down_groups"}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    keys.expect("embedding_size", sizes.embed_dim)
    activation = read_activation(keys)
    attention = sizes.attention(
        GroupedAttentionConfig,
        qkv_bias=True,
        out_bias=True,
        dropout=keys.number("attention_probs_dropout_prob"),
        **{ours: keys.size(theirs) for theirs, ours in _GROUPS.items()},
    )
    groups = {ours: keys.size(theirs) for theirs, ours in _OF_NETWORK.items()}
    network = GroupedFeedForwardConfig(
        keys.whole("intermediate_size"),
        activation,
        gated=False,
        bias=True,
        up_groups=groups["up_groups"],
        down_groups=groups["down_groups"],
    )
    layer = LayerConfig(
        attention,
        network,
        NormConfig("layernorm", eps=1e-12, bias=True),  # whatever the key says
        norm_placement="post",
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, norm),
        **read_head(keys, HeadTransformConfig(None, activation, norm=norm), pooled=(POOLER,)),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    layer: Any = config.layers[0]
    norm: Any = config.embedding.norm
    return {
        "position_embedding_type": "absolute",
        "embedding_size": config.embed_dim,
        "layer_norm_eps": norm.eps,
        **{theirs: getattr(layer.attention, ours) for theirs, ours in _GROUPS.items()},
        **{theirs: getattr(layer.feed_forward, ours) for theirs, ours in _OF_NETWORK.items()},
        **write_head(config, "SqueezeBert"),
    }


def _convolution(theirs: str, ours: str) -> tuple[Rule, ...]:
    theirs, ours = f"encoder.layers.{{i}}.{theirs}", f"layers.{{i}}.{ours}"
    return Rule(f"{theirs}.weight", f"{ours}.weight", Shaped((2,))), Rule(theirs, ours)


_LAYERS = (
    *_convolution("attention.query", "attention.q_proj"),
    *_convolution("attention.key", "attention.k_proj"),
    *_convolution("attention.value", "attention.v_proj"),
    *_convolution("post_attention.conv1d", "attention.o_proj"),
    *_convolution("intermediate.conv1d", "feed_forward.up_proj"),
    *_convolution("output.conv1d", "feed_forward.down_proj"),
    Rule("encoder.layers.{i}.post_attention.layernorm", "layers.{i}.attention_norm"),
    Rule("encoder.layers.{i}.output.layernorm", "layers.{i}.feed_forward_norm"),
)
HEADS = Heads(
    "cls.predictions.decoder",
    "cls.predictions.bias",
    PREDICTIONS,
    pooled=POOLER_RULE,
    beside={r"cls\.seq_relationship\..+": "says whether two texts follow on, beside the logits"},
    others=r"cls\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, (*EMBEDDINGS, *_LAYERS), "transformer.")


FAMILIES = (
    Family(
        "squeezebert",
        "SqueezeBert",
        read,
        table,
        defaults={
            **DEFAULTS,
            "embedding_size": 768,
            **dict.fromkeys((*_GROUPS, *_OF_NETWORK), 4),
            "post_attention_groups": 1,
        },
        write=write,
        with_head=MASKED,
    ),
)
