"""Arcee (AFM 2025): Llama with relu² networks without gates."""

from __future__ import annotations

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    network = read_network(keys, gated=False, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, network=network)
    return plain.decoder([plain.layer(plain.attention())])


FAMILIES = (
    Family(
        "arcee",
        "Arcee",
        read,
        DECODER,
        defaults=PLAIN_DEFAULTS
        | {
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        gguf=Gguf("arcee", steps=PAIRS),
    ),
)
