"""Mellum 2 (JetBrains 2026): Qwen3-MoE with windows and rotary embeddings by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import LayerConfig, MixtureConfig, QKNormConfig, RopeConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, windowed, write_window
from polyhead.families.common.reading import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes, stated_length, write_ropes
from polyhead.families.common.tables import DECODER
from polyhead.families.qwen_moe import EXPERTS, HARMLESS, read_mixture, write_networks

_ROPES = {FULL: RopeConfig(500_000.0), SLIDING: RopeConfig(10_000.0)}
_DENSE, _SPARSE = "dense", "sparse"


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, biased = read_sizes(keys), read_rms_norm(keys), keys.flag("attention_bias")
    count, ropes = sizes.num_layers, _ROPES
    kinds = read_layer_types(keys, count, [FULL] * count)
    if keys.take("rope_parameters", None) is not None:
        ropes = read_ropes(keys, sizes.head_dim, sizes.max_positions, dict.fromkeys(LAYER_TYPES))
    if missing := {*kinds} - ropes.keys():
        raise keys.refused("rope_parameters", {*ropes}, f"an object with {missing.pop()} too")
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        rope=ropes.get(SLIDING),
        dropout=keys.number("attention_dropout"),
    )
    networks = {
        _DENSE: read_network(keys),
        _SPARSE: read_mixture(keys, shared=False, normalize=keys.flag("norm_topk_prob")),
    }
    named = read_layer_types(keys, count, [_SPARSE] * count, [*networks], "mlp_layer_types")
    attentions = windowed(keys, attention, count, kinds, rope=ropes.get(FULL))
    return read_decoder(
        keys,
        [
            LayerConfig(each, networks[kind], norm)
            for each, kind in zip(attentions, named, strict=True)
        ],
        max_positions=reach(ropes.get(FULL) or ropes[SLIDING], sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    networks = [layer.feed_forward for layer in config.layers]
    values, windows = write_networks(config), write_window(config, None)
    del values["mlp_only_layers"]
    ropes = {SLIDING if each.window else FULL: each.rope for each in attentions}
    full = ropes.get(FULL) or ropes[SLIDING]
    return {
        **values,
        **windows,
        **write_ropes(ropes),
        "max_position_embeddings": stated_length(full, config.max_positions),
        "mlp_layer_types": [
            _SPARSE if isinstance(each, MixtureConfig) else _DENSE for each in networks
        ],
    }


FAMILIES = (
    Family(
        "mellum",
        "Mellum",
        read,
        replace(
            DECODER.extended(*EXPERTS),
            dropped={**DECODER.dropped, r"mtp\..*": "predicts a second token, for speed alone"},
        ),
        defaults={
            **PLAIN_DEFAULTS,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "sliding_window": 1024,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        aliases={"num_experts": "num_local_experts"},
        write=write,
        harmless=HARMLESS
        | {
            "num_mtp_layers",
            "num_nextn_predict_layers",
            "mtp_layer_types",
            "mtp_mlp_layer_types",
        },
    ),
)
