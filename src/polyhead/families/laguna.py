"""Laguna (Poolside 2026): heads gated by a softplus, numbers of heads of each layer's own, windows,
and a mixture that sigmoids choose beside a shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    GatedAttentionConfig,
    LayerConfig,
    MixtureConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import dense_layers, write_dense_layers
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
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule, under
from polyhead.families.qwen_moe import EXPERTS, PROJECTIONS

_ROPES = {
    FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 1e4},
}
_MIXTURE = "layers.{i}.feed_forward."


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, dense = read_sizes(keys), read_rms_norm(keys), read_network(keys)
    count, biased = sizes.num_layers, keys.flag("attention_bias")
    ropes = read_ropes_of_kinds(keys, sizes.head_dim, sizes.max_positions, _ROPES)
    gating = keys.take("gating")
    if gating not in (True, "per-head", "per-element"):
        raise keys.refused("gating", gating, "true, 'per-head' or 'per-element'")
    full = GatedAttentionConfig(
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        rope=ropes[FULL],
        dropout=keys.number("attention_dropout"),
        gate="softplus",
        gate_per="feature" if gating == "per-element" else "head",
        gate_bias=False,
    )
    of_kind = {
        FULL: full,
        SLIDING: replace(full, rope=ropes[SLIDING], window=keys.size("sliding_window")),
    }
    heads = keys.take("num_attention_heads_per_layer", None) or [sizes.num_heads] * count
    if not isinstance(heads, list) or len(heads) != count or {*map(type, heads)} != {int}:
        raise keys.refused("num_attention_heads_per_layer", heads, f"{count} numbers of heads")
    mixture = MixtureConfig(
        replace(dense, hidden_dim=keys.whole("moe_intermediate_size")),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        shared=replace(dense, hidden_dim=keys.whole("shared_expert_intermediate_size")),
        scoring="sigmoid",
        choice_bias=True,
        normalize=True,
        scale=keys.number("moe_routed_scaling_factor"),
    )
    layers = [
        LayerConfig(replace(of_kind[kind], num_heads=each), dense if is_dense else mixture, norm)
        for kind, each, is_dense in zip(
            read_layer_types(keys, count, [FULL] * count),
            heads,
            dense_layers(keys, count, keys.texts("mlp_layer_types", [])),
            strict=True,
        )
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
    mixture: Any = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    values = {
        "num_attention_heads_per_layer": [each.num_heads for each in attentions],
        "gating": f"per-{'head' if attentions[0].gate_per == 'head' else 'element'}",
        **write_ropes_of_kinds(config, 512),
        **write_dense_layers(config),
        **({"intermediate_size": dense.hidden_dim} if dense else {}),
    }
    if mixture is None:
        return values
    return values | {
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "shared_expert_intermediate_size": mixture.shared.hidden_dim,
        "moe_routed_scaling_factor": mixture.scale,
    }


FAMILIES = (
    Family(
        "laguna",
        "Laguna",
        read,
        DECODER.extended(
            Rule("layers.{i}.self_attn.g_proj", "layers.{i}.attention.gate_proj"),
            Rule("layers.{i}.mlp.experts.e_score_correction_bias", _MIXTURE + "choice_bias"),
            *under(
                "layers.{i}.mlp.shared_expert.",
                _MIXTURE + "shared.",
                {name: name for name in PROJECTIONS},
            ),
            *EXPERTS,
        ),
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "gating": True,
            "num_attention_heads_per_layer": None,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_routed_scaling_factor": 1.0,
            "moe_apply_router_weight_on_input": False,
            "moe_router_logit_softcapping": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write,
        not_supported={
            "moe_apply_router_weight_on_input": "transformers does not compute it either",
            "moe_router_logit_softcapping": "the scores of experts have no softcap here",
        },
        harmless=frozenset(("router_aux_loss_coef",)),
    ),
)
