"""Seed-OSS (ByteDance 2025): Llama with biases and dropout of its own."""

from __future__ import annotations

from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")))
    attention = plain.attention(out_bias=keys.flag("attention_out_bias"))
    dropout = keys.number("residual_dropout")
    return plain.decoder([plain.layer(attention, dropout=dropout)])


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {
        "attention_out_bias": attention.out_bias,
        "residual_dropout": config.layers[0].dropout,
    }


FAMILIES = (
    Family(
        "seed_oss",
        "SeedOss",
        read,
        DECODER,
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "mlp_bias": False,
            "bos_token_id": 0,
            "pad_token_id": 1,
        },
        write=write,
        gguf=Gguf("seed_oss"),
    ),
)
