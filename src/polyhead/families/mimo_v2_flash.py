"""MiMo-V2-Flash (Xiaomi 2025): windows with sinks and twice the kv heads in most layers, a third of
each head rotated, scaled values of a size of their own, and DeepSeek-V3's mixture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import FeedForwardConfig, LayerConfig, MixtureConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    EXPERTS,
    dense_layers,
    read_mixture,
    write_dense_layers,
    write_mixture,
)
from polyhead.families.common.plain import PLAIN_DEFAULTS, write_ropes_of_kinds
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes_of_kinds
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors

_PART = 0.334
_ROPES = {
    kind: {"rope_theta": theta, "partial_rotary_factor": _PART}
    for kind, theta in ((FULL, 5e6), (SLIDING, 1e4))
}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, dense = read_sizes(keys), read_rms_norm(keys), read_network(keys)
    count = sizes.num_layers
    default = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    kinds = read_layer_types(keys, count, default)
    ropes = read_ropes_of_kinds(keys, sizes.head_dim, sizes.max_positions, _ROPES, _PART)
    window, behind = keys.whole("sliding_window"), keys.whole("sliding_window_size", None)
    full = sizes.attention(
        v_head_dim=keys.size("v_head_dim"),
        qkv_bias=keys.flag("attention_bias"),
        rope=ropes[FULL],
        dropout=keys.number("attention_dropout"),
        value_scale=keys.number("attention_value_scale", 1.0),
    )
    near = replace(
        full,
        num_kv_heads=2 * sizes.num_kv_heads,
        rope=ropes[SLIDING],
        window=window if behind is None else behind + 1,
        sinks=True,
    )
    keys.expect("scoring_func", "sigmoid")
    mixture = read_mixture(keys, "sigmoid", dense)
    are_dense = dense_layers(keys, count, keys.texts("mlp_layer_types", []))
    layers = [
        LayerConfig(near if kind == SLIDING else full, dense if is_dense else mixture, norm)
        for kind, is_dense in zip(kinds, are_dense, strict=True)
    ]
    rope = ropes[FULL]
    return read_decoder(
        keys,
        layers,
        max_positions=sizes.max_positions if rope is None else reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    first = attentions[0]
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    return {
        "num_key_value_heads": first.num_kv_heads // (1 if first.window is None else 2),
        "v_head_dim": first.value_dim,
        "attention_value_scale": first.value_scale,
        **write_ropes_of_kinds(config, 129),
        **write_dense_layers(config),
        **(write_mixture(mixture) if mixture else {}),
        **({"intermediate_size": dense.hidden_dim} if dense else {}),
    }


FAMILIES = (
    Family(
        "mimo_v2_flash",
        "MiMoV2Flash",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                *ATTENTION,
                Rule("layers.{i}.self_attn.attention_sink_bias", "layers.{i}.attention.sinks"),
                *NETWORK,
                *EXPERTS,
            ),
            dropped={r"mtp\..+": "predicts further tokens, for training and drafting"},
        ),
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 0,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "eos_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef",)),
    ),
)
