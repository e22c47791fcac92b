"""ERNIE 4.5 (Baidu 2025): Llama with rotary pairs side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import PAIRED


def read(keys: Keys) -> TransformerConfig:
    biased = keys.flag("use_bias")
    plain = Plain(keys, network=read_network(keys, bias=biased), theta=5e5)
    attention = replace(plain.attention(), qkv_bias=biased, out_bias=biased)
    return plain.decoder([plain.layer(attention)])


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"use_bias": attention.qkv_bias}


FAMILIES = (
    Family(
        "ernie4_5",
        "Ernie4_5",
        read,
        PAIRED,
        defaults={
            key: value
            for key, value in PLAIN_DEFAULTS.items()
            if key not in ("attention_bias", "attention_dropout")
        }
        | {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": False,
            "pad_token_id": 0,
        },
        write=write,
        gguf=Gguf("ernie4_5"),
    ),
)
