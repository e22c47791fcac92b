"""Apertus (2025): xIELU networks, normalized queries and keys."""

from __future__ import annotations

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK
from polyhead.families.common.tensors import Tensors, under


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, network=read_network(keys, gated=False), theta=12e6)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    return plain.decoder([plain.layer(attention)])


_XIELU = "layers.{i}.feed_forward.xielu."
_CONSTANTS = {"xielu.beta": 0.5, "xielu.eps": -1e-6}

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
                    _XIELU,
                    {"alpha_p": "alpha_p", "alpha_n": "alpha_n"},
                ),
            ),
            dropped={r"layers\.\d+\.mlp\.act_fn\.(beta|eps)": "constants of the activation"},
            constants={
                key.replace("xielu.", "layers.{i}.mlp.act_fn."): value
                for key, value in _CONSTANTS.items()
            },
        ),
        gguf=Gguf(
            "apertus",
            held={f"xielu.{name}": _XIELU + name for name in ("alpha_p", "alpha_n")},
            alike=_CONSTANTS,
        ),
        defaults=PLAIN_DEFAULTS | {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "pad_token_id": 3},
    ),
)
