"""Llama 1 to 3 (Touvron et al. 2023; Llama 3, 2024)."""

from __future__ import annotations

from polyhead.config import LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf, has_experts
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    keys.expect("rope_interleaved", False, None)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased, out_bias=biased, rope=rope, dropout=keys.number("attention_dropout")
    )
    layer = LayerConfig(attention, read_network(keys, bias=keys.flag("mlp_bias")), norm)
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


FAMILIES = (
    Family(
        "llama",
        "Llama",
        read,
        DECODER,
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        gguf=Gguf(
            "llama",
            steps=PAIRS,
            fits=lambda metadata: not has_experts(metadata),
        ),
    ),
)
