"""Beam (Reflection 2026): gated heads, norms on both sides, and DeepSeek-V3's choice of experts.

Layers with windows rotate; those that see everything scale their queries with position instead.
The residual path shrinks with depth: of n parts so far, each has the same share.
"""

from __future__ import annotations

import math
from typing import Any

from polyhead.config import (
    GatedAttentionConfig,
    LayerConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    EXPERTS,
    STACKED_EXPERTS,
    read_networks,
    write_dense_layers,
    write_networks,
)
from polyhead.families.common.plain import (
    PLAIN_DEFAULTS,
    every,
    windowed,
    write_ropes_of_kinds,
)
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_decoder,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes_of_kinds
from polyhead.families.common.tables import SANDWICH
from polyhead.families.common.tensors import under

_TEMPERATURE = QueryTemperatureConfig(0.1, 2048, offset=1, power=True)
_NAMES = {"n_routed_experts": "num_experts"}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, biased = read_sizes(keys), read_rms_norm(keys), keys.flag("attention_bias")
    count, defaults = sizes.num_layers, {SLIDING: {"rope_theta": 1e4}, FULL: None}
    ropes = read_ropes_of_kinds(keys, sizes.head_dim, sizes.max_positions, defaults)
    placed = {
        kind: {"rope": rope, "query_temperature": None if rope else _TEMPERATURE}
        for kind, rope in ropes.items()
    }
    attention = sizes.attention(
        GatedAttentionConfig,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        dropout=keys.number("attention_dropout"),
        gate_bias="head",
        **placed[SLIDING],
    )
    attentions = windowed(keys, attention, count, [*every(count, 6)[:-1], FULL], **placed[FULL])
    networks = read_networks(keys, "sigmoid", read_network(keys), count, listed=True)
    layers = [
        LayerConfig(
            each,
            network,
            norm,
            norm_placement="sandwich",
            attention_mix=_mix(2 * i + 2),
            feed_forward_mix=_mix(2 * i + 3),
        )
        for i, (each, network) in enumerate(zip(attentions, networks, strict=True))
    ]
    turned = [rope for rope in ropes.values() if rope]
    return read_decoder(
        keys,
        layers,
        max_positions=max(
            [reach(rope, sizes.max_positions) for rope in turned] or [sizes.max_positions]
        ),
        norm=norm,
        logit_softcap=keys.number("final_logit_softcapping", None),
    )


def _mix(parts: int) -> tuple[float, float]:
    """Factors of the residual path and of what is added, where that is one of so many parts."""
    return math.sqrt((parts - 1) / parts), 1 / math.sqrt(parts)


def write(config: TransformerConfig) -> dict[str, Any]:
    values = {_NAMES.get(key, key): value for key, value in write_networks(config).items()}
    return {
        **values,
        **write_dense_layers(config),
        **write_ropes_of_kinds(config, 512),
        "final_logit_softcapping": config.logit_softcap,
    }


FAMILIES = (
    Family(
        "beam",
        "Beam",
        read,
        SANDWICH.extended(
            *EXPERTS,
            *STACKED_EXPERTS,
            *under(
                "layers.{i}.self_attn.",
                "layers.{i}.attention.",
                {name: name for name in ("gate_proj", "gate_bias")},
            ),
        ),
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2560,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "final_logit_softcapping": 30.0,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        aliases=_NAMES,
        write=write,
    ),
)
