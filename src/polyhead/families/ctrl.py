"""CTRL (Keskar et al. 2019): sinusoidal positions, norms first, a head with a bias."""

from __future__ import annotations

import math
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    SinusoidConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_layer_norm, read_mha_sizes
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.gpt2 import ALIASES, SUMMARY, write_gpt


def read(keys: Keys) -> TransformerConfig:
    sizes = read_mha_sizes(keys)
    layer = LayerConfig(
        sizes.attention(qkv_bias=True, out_bias=True),
        FeedForwardConfig(keys.whole("intermediate_size"), "relu", gated=False, bias=True),
        NormConfig("layernorm", eps=1e-6, bias=True),  # the class has no other option
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=sizes.max_positions,
        norm=read_layer_norm(keys),
        embedding=EmbeddingConfig(
            positions="sinusoidal",
            sinusoid=SinusoidConfig("halves"),
            scale=math.sqrt(sizes.embed_dim),
            dropout=keys.number("embd_pdrop"),
        ),
        head_bias=True,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    norm: Any = config.final_norm
    return {**write_gpt(config), "layer_norm_epsilon": norm.eps}


FAMILIES = (
    Family(
        "ctrl",
        "CTRL",
        read,
        Tensors(
            (
                Rule("w", "embedding.tokens"),
                Rule("layernorm", "final_norm"),
                *under(
                    "h.{i}.",
                    "layers.{i}.",
                    {
                        "multi_head_attention.Wq": "attention.q_proj",
                        "multi_head_attention.Wk": "attention.k_proj",
                        "multi_head_attention.Wv": "attention.v_proj",
                        "multi_head_attention.dense": "attention.o_proj",
                        "ffn.0": "feed_forward.up_proj",
                        "ffn.2": "feed_forward.down_proj",
                        "layernorm1": "attention_norm",
                        "layernorm2": "feed_forward_norm",
                    },
                ),
            ),
            prefix="transformer.",
        ),
        defaults={
            "layer_norm_eps": 1e-6,
            "hidden_dropout_prob": 0.1,
            "embd_pdrop": 0.1,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        write=write,
        aliases=ALIASES | {"intermediate_size": "dff"},
        harmless=SUMMARY | {"attn_pdrop"},
        with_head="LMHeadModel",
    ),
)
