"""Apertus (2025): xIELU networks, normalized queries and keys."""

from __future__ import annotations

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK
from polyhead.families.common.tensors import Tensors, under


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, gated=False), theta=12e6)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    return plain.decoder([plain.layer(attention)])


FAMILIES = (
    Family(
        "apertus",
        "Apertus",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *under(
                    "layers.{i}.",
                    "layers.{i}.",
                    {
                        "attention_layernorm": "attention_norm",
                        "feedforward_layernorm": "feed_forward_norm",
                    },
                ),
                *ATTENTION,
                *NETWORK,
                *under(
                    "layers.{i}.mlp.act_fn.",
                    "layers.{i}.feed_forward.xielu.",
                    {"alpha_p": "alpha_p", "alpha_n": "alpha_n"},
                ),
            ),
            dropped={r"layers\.\d+\.mlp\.act_fn\.(beta|eps)": "constants of the activation"},
            constants={
                "layers.{i}.mlp.act_fn.beta": 0.5,
                "layers.{i}.mlp.act_fn.eps": -1e-6,
            },
        ),
        defaults=PLAIN_DEFAULTS | {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "pad_token_id": 3},
    ),
)
