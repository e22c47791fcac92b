"""Arcee (AFM 2025): Llama with relu² networks without gates; Jais 2 (MBZUAI and Inception 2025) has
LayerNorm and biases too.
"""

from __future__ import annotations

from polyhead.config import NormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_layer_norm, read_network
from polyhead.families.common.tables import DECODER


def read(keys: Keys, norm: NormConfig | None = None) -> TransformerConfig:
    network = read_network(keys, gated=False, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, norm=norm, network=network)
    return plain.decoder([plain.layer(plain.attention())])


def read_jais2(keys: Keys) -> TransformerConfig:
    return read(keys, read_layer_norm(keys))


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
    Family(
        "jais2",
        "Jais2",
        read_jais2,
        DECODER,
        defaults={key: value for key, value in PLAIN_DEFAULTS.items() if key != "rms_norm_eps"}
        | {
            "head_dim": None,
            "hidden_act": "relu2",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 150_024,
        },
        gguf=Gguf("jais2"),
    ),
)
