"""Persimmon (Adept, 2023): normed queries and keys, half of every head rotated, squared ReLU."""

from __future__ import annotations

from polyhead.config import LayerConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_decoder,
    read_layer_norm,
    read_mha_sizes,
    read_network,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVPerGroup
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule
from polyhead.families.gpt2 import QKV
from polyhead.families.phi import DENSE, write_partial


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, partial_rotary_factor=0.5)
    layer = LayerConfig(
        sizes.attention(
            qkv_bias=True,
            out_bias=True,
            rope=rope,
            qk_norm=QKNormConfig(norm) if keys.flag("qk_layernorm") else None,
            dropout=keys.number("attention_dropout"),
        ),
        read_network(keys, gated=False, bias=True),
        norm,
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


FAMILIES = (
    Family(
        "persimmon",
        "Persimmon",
        read,
        DECODER.extended(
            *DENSE,
            Rule("layers.{i}.self_attn.query_key_value", QKV, QKVPerGroup()),
            Rule("layers.{i}.mlp.dense_h_to_4h", "layers.{i}.feed_forward.up_proj"),
            Rule("layers.{i}.mlp.dense_4h_to_h", "layers.{i}.feed_forward.down_proj"),
        ),
        defaults={
            "hidden_act": "relu2",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "qk_layernorm": True,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write_partial,
        aliases={"hidden_dropout_prob": "hidden_dropout"},
        harmless=frozenset(("num_key_value_heads",)),  # the class has a key for every head
    ),
)
