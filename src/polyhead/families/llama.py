"""Llama 1 to 3 (Touvron et al. 2023; Llama 3, 2024), and models of its class under other names:
InternLM3 (Shanghai AI Laboratory 2025) and IQuest-Coder (2026).
"""

from __future__ import annotations

from typing import Any

from polyhead.config import LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf, has_experts
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER


def read(keys: Keys, **rotary: Any) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    keys.expect("rope_interleaved", False, None)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, **rotary)
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


def read_internlm3(keys: Keys) -> TransformerConfig:
    biased = keys.flag("attention_bias")
    if keys.flag("mlp_bias") != biased:
        raise keys.refused("attention_bias", biased, f"the same as {keys.named('mlp_bias')}")
    return read(keys)


_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

FAMILIES = (
    Family(
        "llama",
        "Llama",
        read,
        DECODER,
        defaults=_DEFAULTS,
        gguf=Gguf(
            "llama",
            steps=PAIRS,
            fits=lambda metadata: not has_experts(metadata),
        ),
        more_gguf=(
            # InternLM 2, whose fused queries, keys and values the converter cuts, and EXAONE 3.
            Gguf("internlm2", steps=PAIRS, saved=False),
            Gguf("exaone", settings={"attention.layer_norm_epsilon": None}, saved=False),
            # DeciLM, whose layers differ in kv heads, XVERSE, and openPangu.
            Gguf("deci", steps=PAIRS, saved=False),
            Gguf("xverse", steps=PAIRS, saved=False),
            Gguf("pangu-embedded", saved=False),
            # The number of layers tells Baichuan's 7B from 13B, which has ALiBi.
            Gguf(
                "baichuan",
                steps=PAIRS,
                fits=lambda metadata: metadata.get("baichuan.block_count") == 32,
                saved=False,
            ),
        ),
    ),
    Family(
        "internlm3",
        "Llama",
        read_internlm3,
        DECODER,
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 2,
        },
        aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    Family(
        "iquestcoder",
        "Llama",
        read,
        DECODER,
        defaults=_DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        not_supported={
            "clip_qkv": "transformers refuses it",
            "use_sliding_window": "transformers refuses it",
        },
        harmless=frozenset(("sliding_window", "max_window_layers")),
    ),
)
