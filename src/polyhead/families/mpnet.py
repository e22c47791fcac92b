"""MPNet (Song et al. 2020): RoBERTa with T5's bias by distance in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    HeadTransformConfig,
    RelativeBiasConfig,
    TransformerConfig,
)
from polyhead.families import roberta
from polyhead.families.bert import DEFAULTS, EMBEDDINGS, POOLER, read_encoder, read_layers
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import MASKED, PRE_TRAINING, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under

_PADDING = 1  # transformers' code has it, whatever pad_token_id says
_BUCKETS = RelativeBiasConfig(num_buckets=32, max_distance=128)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    keys.expect("relative_attention_num_buckets", _BUCKETS.num_buckets)
    if sizes.max_positions < _PADDING + 2:
        raise keys.refused(
            "max_position_embeddings", sizes.max_positions, f"{_PADDING + 2} or more"
        )
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions - _PADDING - 1,
        embedding=EmbeddingConfig(
            positions="learned",
            position_offset=_PADDING + 1,
            norm=norm,
            dropout=keys.number("hidden_dropout_prob"),
        ),
        relative_bias=_BUCKETS,
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=norm),
            pooled=(POOLER,),
            without=(PRE_TRAINING,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": config.max_positions + config.embedding.position_offset,
        "relative_attention_num_buckets": _BUCKETS.num_buckets,
        **write_head(config, "MPNet"),
    }


RULES = (
    *EMBEDDINGS,
    Rule("encoder.relative_attention_bias.weight", "relative_bias.weight"),
    *under(
        "encoder.layer.{i}.",
        "layers.{i}.",
        {
            "attention.attn.q": "attention.q_proj",
            "attention.attn.k": "attention.k_proj",
            "attention.attn.v": "attention.v_proj",
            "attention.attn.o": "attention.o_proj",
            "attention.LayerNorm": "attention_norm",
            "intermediate.dense": "feed_forward.up_proj",
            "output.dense": "feed_forward.down_proj",
            "output.LayerNorm": "feed_forward_norm",
        },
    ),
)


def table(values: Mapping[str, Any]) -> Tensors:
    return roberta.HEADS.table(values, RULES, "mpnet.")


FAMILIES = (
    Family(
        "mpnet",
        "MPNet",
        read,
        table,
        defaults={
            **{key: value for key, value in DEFAULTS.items() if key != "type_vocab_size"},
            "relative_attention_num_buckets": 32,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        write=write,
        with_head=MASKED,
    ),
)
