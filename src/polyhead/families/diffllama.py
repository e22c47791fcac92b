"""DiffLlama: Llama with differential attention (Ye et al. 2024), λ₀ by the number of the layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import DifferentialAttentionConfig, TransformerConfig, first_lambda
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.tables import DECODER, FREQUENCIES
from polyhead.families.common.tensors import under


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    keys.expect("attention_dropout", 0.0)
    sizes, biased = plain.sizes, keys.flag("attention_bias")
    attention = DifferentialAttentionConfig(
        sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, qkv_bias=biased, out_bias=biased,
        rope=plain.rope, norm_eps=plain.norm.eps,
    )  # fmt: skip
    return plain.decoder(
        [
            plain.layer(replace(attention, lambda_init=first_lambda(i)))
            for i in range(sizes.num_layers)
        ]
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    if any(layer.attention.kind != "differential" for layer in config.layers):
        raise ConfigError("this family needs differential attention in every layer")
    return {}


_LAMBDAS = {name: name for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}

FAMILIES = (
    Family(
        "diffllama",
        "DiffLlama",
        read,
        replace(
            DECODER.extended(*under("layers.{i}.self_attn.", "layers.{i}.attention.", _LAMBDAS)),
            dropped=FREQUENCIES,
        ),
        defaults={**PLAIN_DEFAULTS, "rms_norm_eps": 1e-5},
        write=write,
        harmless=frozenset(("lambda_std_dev",)),
    ),
)
