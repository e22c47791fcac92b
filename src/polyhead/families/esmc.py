"""ESM Cambrian (EvolutionaryScale 2024): a rotary encoder of proteins with SwiGLU networks.

Queries and keys are normalized over all heads; what layers add shrinks with their number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.families.bert import POOLER, read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_network, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tasks import (
    ANSWERS,
    CLASSIFICATION_HEAD,
    MASKED,
    TOKENS,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors

_NORM, _PLAIN = (NormConfig("layernorm", eps=1e-5, bias=bias) for bias in (True, False))
_DEPTH = 36  # layers of which each adds what it computes as it is


def read(keys: Keys) -> TransformerConfig:
    sizes = read_sizes(keys)
    if sizes.num_kv_heads != sizes.num_heads:
        raise keys.refused("num_key_value_heads", sizes.num_kv_heads, f"{sizes.num_heads}, of all")
    keys.expect("tie_word_embeddings", False)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    biased = keys.flag("attention_bias")
    layer = LayerConfig(
        sizes.attention(
            rope=rope,
            qkv_bias=biased,
            out_bias=biased,
            qk_norm=QKNormConfig(_PLAIN, "full_width"),
            dropout=keys.number("attention_dropout", 0.0),
        ),
        read_network(keys, bias=keys.flag("mlp_bias")),
        _NORM,
        residual_scale=1 / math.sqrt(sizes.num_layers / _DEPTH),
    )
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        embedding=EmbeddingConfig(),
        final_norm=_PLAIN,
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=_NORM),
            pooled=(POOLER,),
            without=(ANSWERS,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {**write_head(config, "Esmc"), "tie_word_embeddings": False}


HEADS = Heads(
    "lm_head.decoder",
    masked=(
        Rule("lm_head.dense", "head.transforms.0.dense"),
        Rule("lm_head.layer_norm", "head.transforms.0.norm"),
    ),
    texts=CLASSIFICATION_HEAD,
    own={TOKENS: (Rule("score", "task.classifier"),)},
    others=r"lm_head\..+",
    dropped=DECODER.dropped,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table({**values, "tie_word_embeddings": False}, DECODER.rules, "esmc.")


FAMILIES = (
    Family(
        "esmc",
        "Esmc",
        read,
        table,
        defaults={
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 1,
            "tie_word_embeddings": False,
        },
        write=write,
        with_head=MASKED,
    ),
)
