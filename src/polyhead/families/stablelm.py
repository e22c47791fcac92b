"""StableLM (Stability AI, 2023-2024): SwiGLU with LayerNorm, a quarter of every head rotated."""

from __future__ import annotations

from typing import Any

from polyhead.config import LayerConfig, NormConfig, QKNormConfig, TransformerConfig
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
from polyhead.families.phi import write_partial


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys, own_head_dim=False), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, partial_rotary_factor=0.25)
    per_head = QKNormConfig(NormConfig("layernorm", eps=norm.eps), per_head=True)
    layer = LayerConfig(
        sizes.attention(
            qkv_bias=keys.flag("use_qkv_bias"),
            rope=rope,
            qk_norm=per_head if keys.flag("qk_layernorm") else None,
            dropout=keys.number("attention_dropout"),
        ),
        read_network(keys),
        norm,
        parallel="one norm" if keys.flag("use_parallel_residual") else None,
        dropout=keys.number("hidden_dropout_prob"),
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    layer = config.layers[0]
    attention: Any = layer.attention
    return {
        **write_partial(config),
        "use_qkv_bias": attention.qkv_bias,
        "use_parallel_residual": layer.parallel is not None,
    }


FAMILIES = (
    Family(
        "stablelm",
        "StableLm",
        read,
        DECODER.extended(
            Rule("layers.{i}.self_attn.q_layernorm.norms.{j}", "layers.{i}.attention.q_norm"),
            Rule("layers.{i}.self_attn.k_layernorm.norms.{j}", "layers.{i}.attention.k_norm"),
        ),
        defaults={
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
        },
        write=write,
        aliases={"hidden_dropout_prob": "hidden_dropout"},
        gguf=Gguf(
            "stablelm",
            settings={"use_parallel_residual": "use_parallel_residual"},
            names={
                "layers.{i}.self_attn.q_layernorm.norms.{j}": "blk.{i}.attn_q_norm",
                "layers.{i}.self_attn.k_layernorm.norms.{j}": "blk.{i}.attn_k_norm",
            },
            values=lambda values: {"use_qkv_bias": values["attention_bias"]},
        ),
        more_gguf=(Gguf("orion", saved=False),),
    ),
)
