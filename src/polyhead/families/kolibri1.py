"""Kolibri 1 (Aleph Alpha 2026) and Flint (Recursive 2026): mixtures of experts whose layers with
windows rotate, while those that see everything do not; queries and keys are normalized.

Kolibri has norms on both sides and adds a bias to the router's logits for the choice of experts;
Flint has sinks, and dense layers first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import EXPERTS
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, every, windowed, write_window
from polyhead.families.common.reading import FULL, SLIDING
from polyhead.families.common.tables import DECODER, SINKS
from polyhead.families.common.tensors import Rule
from polyhead.families.qwen_moe import EXPERTS as EXPERTS_OF_FLINT
from polyhead.families.qwen_moe import (
    HARMLESS,
    SHARED,
    find_mixture,
    read_mixture,
    sparse_layers,
    write_experts,
    write_networks,
)


def read(keys: Keys) -> TransformerConfig:
    mixture = replace(
        read_mixture(keys, shared=True, normalize=keys.flag("norm_topk_prob")),
        shared_gate=False,
        scoring="sigmoid",
        choice_bias=True,
        choice_bias_of="logits",
    )
    plain = Plain(keys, network=mixture.expert)
    count = plain.sizes.num_layers
    keys.size("sliding_window")  # transformers needs one even where no layer has it
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    attentions = windowed(keys, attention, count, every(count, 5), rope=None)
    return plain.decoder(
        [plain.layer(each, mixture, norm_placement="sandwich") for each in attentions]
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    values = write_experts(find_mixture(config), [])
    del values["mlp_only_layers"]
    return {**values, **write_window(config, 513)}


def read_flint(keys: Keys) -> TransformerConfig:
    mixture = replace(
        read_mixture(keys, shared=True, normalize=keys.flag("norm_topk_prob")),
        shared_gate=False,
        scoring="sigmoid",
    )
    plain = Plain(keys)
    count = plain.sizes.num_layers
    default = [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm), sinks=True)
    sparse = sparse_layers(keys, count, dense=(0, 1))
    return plain.decoder(
        [
            plain.layer(each, mixture if i in sparse else None)
            for i, each in enumerate(windowed(keys, attention, count, default, rope=None))
        ]
    )


def write_flint(config: TransformerConfig) -> dict[str, Any]:
    return {**write_networks(config), **write_window(config, 513)}


_DEFAULTS = {
    **PLAIN_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "sliding_window": 513,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LAYER, _FEED_FORWARD = "layers.{i}.", "layers.{i}.feed_forward."

FAMILIES = (
    Family(
        "kolibri1",
        "Kolibri1",
        read,
        DECODER.extended(
            Rule(_LAYER + "moe.router.expert_bias", _FEED_FORWARD + "choice_bias"),
            Rule(_LAYER + "post_attn_norm", _LAYER + "attention_out_norm"),
            Rule(_LAYER + "post_ffn_norm", _LAYER + "feed_forward_out_norm"),
            *EXPERTS,
        ),
        defaults={key: value for key, value in _DEFAULTS.items() if key != "attention_bias"}
        | {"num_experts": 384, "shared_expert_intermediate_size": 512, "norm_topk_prob": False},
        aliases={"num_experts": "num_local_experts"},
        write=write,
        not_supported={"attention_bias": "transformers reads it and does not apply it"},
    ),
    Family(
        "flint",
        "Flint",
        read_flint,
        DECODER.extended(
            *EXPERTS_OF_FLINT,
            *SHARED[1:],
            Rule(_LAYER + "self_attn.softmax_offset", _LAYER + "attention.sinks"),
            SINKS,
        ),
        defaults=_DEFAULTS
        | {
            "num_experts": 256,
            "shared_expert_intermediate_size": 1024,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        write=write_flint,
        harmless=HARMLESS,
    ),
)
