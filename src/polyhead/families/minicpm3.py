"""MiniCPM 3 (2024): latent attention as DeepSeek has it; embeddings, residuals, logits scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingConfig, LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm
from polyhead.families.common.rope import reach
from polyhead.families.deepseek import read_attention, tensors, write_attention


def read(keys: Keys) -> TransformerConfig:
    embed_dim, count = keys.size("hidden_size"), keys.num_layers("num_hidden_layers")
    max_positions, norm = keys.whole("max_position_embeddings"), read_rms_norm(keys)
    value_size = embed_dim // keys.size("num_attention_heads")
    attention = read_attention(keys, max_positions, value_size=value_size)
    depth, base = keys.number("scale_depth", None), keys.whole("dim_model_base", None)
    layer = LayerConfig(
        attention,
        read_network(keys, bias=keys.flag("mlp_bias")),
        norm,
        residual_scale=1.0 if depth is None else depth / math.sqrt(count),
    )
    rope = attention.rope
    return read_decoder(
        keys,
        [layer] * count,
        max_positions=max_positions if rope is None else reach(rope, max_positions),
        norm=norm,
        embedding=EmbeddingConfig(scale=keys.number("scale_emb")),
        logit_scale=1.0 if base is None else base / embed_dim,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    base = round(config.logit_scale * config.embed_dim)
    return {
        **write_attention(config.layers[0].attention),
        "mlp_bias": network.bias,
        "scale_emb": config.embedding.scale,
        "scale_depth": config.layers[0].residual_scale * math.sqrt(len(config.layers)),
        "dim_model_base": base,
    }


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The format leaves the size of values to the model's width."""
    heads, rotated = values["num_attention_heads"], values.get("qk_rope_head_dim", 0)
    return {
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_nope_head_dim": values.get(".key_length", 0) - rotated,
        "v_head_dim": values["hidden_size"] // max(1, heads),
    }


FAMILIES = (
    Family(
        "minicpm3",
        "MiniCPM3",
        read,
        lambda values: tensors({**values, "rope_interleave": False}),
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 40,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "mlp_bias": False,
            "head_dim": None,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": None,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        write=write,
        harmless=frozenset(("pretraining_tp",)),
        gguf=Gguf(
            "minicpm3",
            settings={
                "attention.q_lora_rank": "q_lora_rank",
                "attention.kv_lora_rank": "kv_lora_rank",
                "attention.key_length": ".key_length",
                "attention.value_length": None,
                "rope.dimension_count": "qk_rope_head_dim",
            },
            values=_from_gguf,
        ),
    ),
)
