"""BLOOM (BigScience, 2022): ALiBi in place of positions, and a norm on the embedding."""

from __future__ import annotations

from polyhead.config import (
    ALiBiConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_layer_norm, read_mha_sizes
from polyhead.families.common.steps import QKVPerGroup, QKVRows
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.gpt2 import QKV

AROUND_LAYERS = (
    Rule("word_embeddings", "embedding.tokens"),
    Rule("ln_f", "final_norm"),
)
LAYERS = (
    Rule("h.{i}.self_attention.query_key_value", QKV, QKVPerGroup()),
    *under(
        "h.{i}.",
        "layers.{i}.",
        {
            "self_attention.dense": "attention.o_proj",
            "mlp.dense_h_to_4h": "feed_forward.up_proj",
            "mlp.dense_4h_to_h": "feed_forward.down_proj",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "feed_forward_norm",
        },
    ),
)


def read(keys: Keys) -> TransformerConfig:
    # The bias has no end: the length is the one that BLOOM was trained on.
    sizes, norm = read_mha_sizes(keys, max_positions=2048), read_layer_norm(keys)
    attention = sizes.attention(
        qkv_bias=True,
        out_bias=True,
        alibi=ALiBiConfig(),
        dropout=keys.number("attention_dropout"),
    )
    layer = LayerConfig(
        attention,
        FeedForwardConfig(4 * sizes.embed_dim, "gelu_tanh", gated=False, bias=True),
        norm,
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=sizes.max_positions,
        norm=norm,
        embedding=EmbeddingConfig(norm=norm),
    )


FAMILIES = (
    Family(
        "bloom",
        "Bloom",
        read,
        Tensors(
            (*AROUND_LAYERS, Rule("word_embeddings_layernorm", "embedding.norm"), *LAYERS),
            prefix="transformer.",
        ),
        defaults={
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        aliases={
            "hidden_size": "n_embed",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "seq_length",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_dropout_prob": "hidden_dropout",
        },
        not_supported={
            "apply_residual_connection_post_layernorm": "the residual stream begins after the norm",
            "n_inner": "transformers does not read it either: the network is 4 times as wide",
        },
        harmless=frozenset(
            (
                "attention_softmax_in_fp32",
                "bias_dropout_fusion",
                "masked_softmax_fusion",
                "offset_alibi",
                "skip_bias_add",
                "skip_bias_add_qkv",
                "slow_but_exact",
                "unk_token_id",
            )
        ),
        gguf=Gguf(
            "bloom",
            settings={"attention.head_count_kv": None, "feed_forward_length": None},
            steps={"h.{i}.self_attention.query_key_value": (QKVRows(),)},
        ),
    ),
)
