"""StarCoder2 (Lozhkov et al. 2024): grouped heads, a window, LayerNorm and biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import EmbeddingConfig, InitialConfig, LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_decoder,
    read_layer_norm,
    read_network,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    biased = keys.flag("use_bias")
    keys.expect("norm_type", "layer_norm")
    keys.expect("mlp_type", "default")
    layer = LayerConfig(
        sizes.attention(
            qkv_bias=biased,
            out_bias=biased,
            rope=rope,
            window=keys.whole("sliding_window", None),
            dropout=keys.number("attention_dropout"),
        ),
        read_network(keys, gated=False, bias=biased),
        norm,
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
        embedding=EmbeddingConfig(dropout=keys.number("embedding_dropout")),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"use_bias": attention.qkv_bias, "embedding_dropout": config.embedding.dropout}


_QKV = tuple(f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
_GGUF = Gguf("starcoder2", values=lambda values: {"use_bias": values["attention_bias"]})

FAMILIES = (
    Family(
        "starcoder2",
        "Starcoder2",
        read,
        DECODER.extended(
            Rule("layers.{i}.mlp.c_fc", "layers.{i}.feed_forward.up_proj"),
            Rule("layers.{i}.mlp.c_proj", "layers.{i}.feed_forward.down_proj"),
        ),
        initial=InitialConfig(scale=0.018042),
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "embedding_dropout": 0.0,
            "use_bias": True,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "pad_token_id": None,
        },
        write=write,
        # The class reads hidden_act and norm_epsilon; released files have other names beside them.
        harmless=frozenset(
            (
                "activation_function",
                "layer_norm_epsilon",
                "attention_softmax_in_fp32",
                "scale_attention_softmax_in_fp32",
                "scale_attn_weights",
            )
        ),
        aliases={"layer_norm_eps": "norm_epsilon", "hidden_dropout_prob": "residual_dropout"},
        gguf=_GGUF,
        more_gguf=(
            # CodeShell, which has one matrix of queries, keys and values.
            replace(
                _GGUF,
                arch="codeshell",
                rules=(Rule("blk.{i}.attn_qkv", _QKV, QKVRows()),),
                saved=False,
            ),
        ),
    ),
)
