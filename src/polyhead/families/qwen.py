"""Qwen 2 and 3 (2024, 2025): late layers may have windows; 3 normalizes queries and keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import LayerConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_decoder,
    read_late_windows,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER

_DEFAULTS = {
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def read(keys: Keys, *, third: bool, **rotary: Any) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, **rotary)
    biased = third and keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased or not third,
        out_bias=biased,
        rope=rope,
        qk_norm=QKNormConfig(norm) if third else None,
        dropout=keys.number("attention_dropout"),
    )
    network = read_network(keys)
    layers = [
        LayerConfig(replace(attention, window=window), network, norm)
        for window in read_late_windows(keys, sizes.num_layers)
    ]
    return read_decoder(keys, layers, max_positions=reach(rope, sizes.max_positions), norm=norm)


FAMILIES = (
    Family(
        "qwen2",
        "Qwen2",
        partial(read, third=False),
        DECODER,
        defaults=_DEFAULTS,
        gguf=Gguf("qwen2"),
    ),
    Family(
        "qwen3",
        "Qwen3",
        partial(read, third=True),
        DECODER,
        defaults=_DEFAULTS | {"head_dim": 128, "attention_bias": False},
        gguf=Gguf("qwen3"),
    ),
)
