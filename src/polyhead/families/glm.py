"""GLM-4 (2024), GLM-4-0414 and GLM-4.5 (2025): half of each head is rotated, in pairs."""

from __future__ import annotations

from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, write_share
from polyhead.families.common.steps import RotaryPairs, Rows
from polyhead.families.common.tables import AROUND_LAYERS, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under

_DEFAULTS = PLAIN_DEFAULTS | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 151329,
}


def read_first(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, partial_rotary_factor=0.5)
    return plain.decoder([plain.layer(plain.attention(out_bias=False))])


def read_second(keys: Keys, *, part: float = 0.5, **rotary: Any) -> TransformerConfig:
    plain = Plain(keys, partial_rotary_factor=part, **rotary)
    layer = plain.layer(plain.attention(out_bias=False), norm_placement="sandwich")
    return plain.decoder([layer])


def tensors(norms: tuple[Rule, ...]) -> Tensors:
    theirs, ours = "layers.{i}.self_attn.", "layers.{i}.attention."
    gate_up = tuple(f"layers.{{i}}.feed_forward.{name}_proj" for name in ("gate", "up"))
    return Tensors(
        (
            *AROUND_LAYERS,
            *norms,
            *(Rule(theirs + name, ours + name, RotaryPairs()) for name in ("q_proj", "k_proj")),
            *under(theirs, ours, {"v_proj": "v_proj", "o_proj": "o_proj"}),
            Rule("layers.{i}.mlp.gate_up_proj", gate_up, Rows()),
            Rule("layers.{i}.mlp.down_proj", "layers.{i}.feed_forward.down_proj"),
        )
    )


_SANDWICH = under(
    "layers.{i}.",
    "layers.{i}.",
    {
        "input_layernorm": "attention_norm",
        "post_self_attn_layernorm": "attention_out_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "post_mlp_layernorm": "feed_forward_out_norm",
    },
)

FAMILIES = (
    Family("glm", "Glm", read_first, tensors(NORMS), defaults=_DEFAULTS, write=write_share),
    Family(
        "glm4",
        "Glm4",
        read_second,
        tensors(_SANDWICH),
        defaults=_DEFAULTS,
        write=write_share,
        gguf=Gguf("glm4"),
    ),
)
