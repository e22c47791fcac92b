"""Helium (Kyutai 2025): Llama with rotary pairs side by side."""

from __future__ import annotations

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import PAIRED


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, bias=keys.flag("mlp_bias")), theta=1e5)
    return plain.decoder([plain.layer(plain.attention(out_bias=False))])


FAMILIES = (
    Family(
        "helium",
        "Helium",
        read,
        PAIRED,
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "mlp_bias": False,
            "pad_token_id": 3,
        },
    ),
)
