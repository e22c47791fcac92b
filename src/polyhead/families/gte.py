"""GTE (Zhang et al. 2024, mGTE): BERT with rotary positions and a gated network, whose last
projection alone has a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import EmbeddingConfig, HeadTransformConfig, LayerConfig, TransformerConfig
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    POOLER,
    POOLER_RULE,
    POSITIONS,
    read_encoder,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes, read_network
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVRows, Rows
from polyhead.families.common.tasks import ANSWERS, MASKED, Heads, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under

_THETA = 160_000.0


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=_THETA)
    dropout = keys.number("hidden_dropout_prob")
    layer = LayerConfig(
        sizes.attention(
            rope=rope,
            qkv_bias=True,
            out_bias=True,
            dropout=keys.number("attention_probs_dropout_prob"),
        ),
        replace(read_network(keys), down_bias=True, dropout=dropout),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        embedding=EmbeddingConfig(
            num_segments=keys.whole("type_vocab_size"), norm=norm, dropout=dropout
        ),
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=norm),
            pooled=(POOLER,),
            without=(ANSWERS,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return write_head(config, "Gte")


_Q, _K, _V = (f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
_UP, _GATE = (f"layers.{{i}}.feed_forward.{name}_proj" for name in ("up", "gate"))
RULES = (
    *(rule for rule in EMBEDDINGS if "position" not in rule.theirs),
    Rule("encoder.layer.{i}.attention.qkv_proj", (_Q, _K, _V), QKVRows()),
    Rule("encoder.layer.{i}.mlp.up_gate_proj", (_UP, _GATE), Rows()),
    *under(
        "encoder.layer.{i}.",
        "layers.{i}.",
        {
            "attention.o_proj": "attention.o_proj",
            "attn_ln": "attention_norm",
            "mlp.down_proj": "feed_forward.down_proj",
            "mlp_ln": "feed_forward_norm",
        },
    ),
)
HEADS = Heads(
    "lm_head.decoder",
    masked=(
        Rule("lm_head.dense", "head.transforms.0.dense"),
        Rule("lm_head.norm", "head.transforms.0.norm"),
    ),
    pooled=POOLER_RULE,
    others=r"lm_head\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, RULES, "gte.")


FAMILIES = (
    Family(
        "gte",
        "Gte",
        read,
        table,
        defaults={
            **DEFAULTS,
            "attention_probs_dropout_prob": 0.0,
            "type_vocab_size": 1,
            "pad_token_id": 1,
        },
        write=write,
        with_head=MASKED,
    ),
)
