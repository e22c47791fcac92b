"""Phi 1 to 2 (Gunasekar et al. 2023): attention and network side by side after one norm."""

from __future__ import annotations

from typing import Any

from polyhead.config import EmbeddingConfig, LayerConfig, QKNormConfig, TransformerConfig
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
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule

DENSE = (
    Rule("final_layernorm", "final_norm"),
    Rule("layers.{i}.self_attn.dense", "layers.{i}.attention.o_proj"),
    Rule("layers.{i}.self_attn.q_layernorm", "layers.{i}.attention.q_norm"),
    Rule("layers.{i}.self_attn.k_layernorm", "layers.{i}.attention.k_norm"),
)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_layer_norm(keys)
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
        parallel="one norm",
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
        embedding=EmbeddingConfig(dropout=keys.number("embd_pdrop")),
        head_bias=True,
    )


def write_partial(config: TransformerConfig) -> dict[str, Any]:
    """Keys of families that rotate a part of every head by default."""
    attention: Any = config.layers[0].attention
    return {
        "qk_layernorm": attention.qk_norm is not None,
        "partial_rotary_factor": (attention.rope.dim or attention.head_dim) / attention.head_dim,
    }


def write(config: TransformerConfig) -> dict[str, Any]:
    return {**write_partial(config), "embd_pdrop": config.embedding.dropout}


FAMILIES = (
    Family(
        "phi",
        "Phi",
        read,
        DECODER.extended(
            *DENSE,
            Rule("layers.{i}.mlp.fc1", "layers.{i}.feed_forward.up_proj"),
            Rule("layers.{i}.mlp.fc2", "layers.{i}.feed_forward.down_proj"),
        ),
        defaults={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "embd_pdrop": 0.0,
            "qk_layernorm": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write,
        aliases={"hidden_dropout_prob": "resid_pdrop"},
        gguf=Gguf("phi2"),
    ),
)
