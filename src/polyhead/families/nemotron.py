"""Nemotron (NVIDIA 2024): LayerNorms by one plus the weight, relu², half of each head rotated."""

from __future__ import annotations

from typing import Any

from polyhead.config import InitialConfig, NormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, write_share
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import DECODER


def read(keys: Keys) -> TransformerConfig:
    norm = NormConfig("layernorm", eps=keys.number("norm_eps"), bias=True, weight_offset=1.0)
    network = read_network(keys, gated=False, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, norm=norm, network=network, partial_rotary_factor=0.5)
    return plain.decoder([plain.layer(plain.attention())])


def write(config: TransformerConfig) -> dict[str, Any]:
    return {"norm_eps": config.layers[0].norm.eps, **write_share(config)}


FAMILIES = (
    Family(
        "nemotron",
        "Nemotron",
        read,
        DECODER,
        initial=InitialConfig(scale=0.0134),
        defaults={key: value for key, value in PLAIN_DEFAULTS.items() if key != "rms_norm_eps"}
        | {
            "head_dim": None,
            "hidden_act": "relu2",
            "norm_eps": 1e-5,
            "mlp_bias": False,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        write=write,
        gguf=Gguf("nemotron", {"attention.layer_norm_epsilon": "norm_eps"}, norms=1.0),
    ),
)
