"""HY 4 (Tencent, 2026): GLM-5's latent attention with indexers, gated and with sinks, and several
residual streams (hyper-connections). What enters the experts' activations is clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    HyperConnectionsConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families import deepseek
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import write_dense_layers
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    found = deepseek.read(keys, "sigmoid", sparse_attention="shared", listed=True)
    eps = found.layers[0].norm.eps
    streams = HyperConnectionsConfig(
        keys.size("hc_mult"), keys.positive("hc_magnitude"), keys.number("hc_eps"), eps
    )
    limit = keys.number("swiglu_limit")
    return replace(
        found, layers=tuple(_changed(each, streams, limit, eps) for each in found.layers)
    )


def _changed(
    layer: LayerConfig, streams: HyperConnectionsConfig, limit: float, eps: float
) -> LayerConfig:
    """GLM-5's layer as HY 4 has it."""
    attention: Any = layer.attention
    network: Any = layer.feed_forward
    norm = NormConfig("layernorm", eps=eps, bias=True)
    indexer = replace(attention.indexer, norm=norm, rotates="last")
    if isinstance(network, MixtureConfig):
        network = replace(network, expert=replace(network.expert, clamp=limit))
    return replace(
        layer,
        attention=replace(attention, indexer=indexer, gated=True, sinks=True),
        feed_forward=network,
        streams=streams,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    layer, networks = config.layers[0], [layer.feed_forward for layer in config.layers]
    streams = layer.streams
    if not isinstance(streams, HyperConnectionsConfig):
        raise ConfigError("this family has several residual streams (hyper-connections)")
    sparse: Any = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    reads = [bool(layer.attention.reads) for layer in config.layers]
    return {
        **deepseek.write(config),
        **write_dense_layers(config),
        "indexer_types": ["shared" if each else "full" for each in reads],
        "hc_mult": streams.count,
        "hc_magnitude": streams.magnitude,
        "hc_eps": streams.eps,
        **({} if sparse is None else {"swiglu_limit": sparse.expert.clamp}),
    }


_LAYER = "layers.{i}."
_RULES = (
    Rule(_LAYER + "self_attn.learnable_sink_param", _LAYER + "attention.sinks"),
    Rule(_LAYER + "self_attn.linear_gate", _LAYER + "attention.gate_proj"),
    Rule(_LAYER + "mlp.linear_gate", _LAYER + "feed_forward.gate_proj"),
    Rule(_LAYER + "mlp.shared_experts.linear_gate", _LAYER + "feed_forward.shared.gate_proj"),
    *(
        rule
        for theirs, ours in (
            (_LAYER + "hc_pre.hc_attn_layer.hc_", _LAYER + "attention_streams."),
            (_LAYER + "hc_pre.hc_mlp_layer.hc_", _LAYER + "feed_forward_streams."),
            ("hc_pre.hc_head.hc_head_", "streams."),
        )
        for rule in under(theirs, ours, {"fn": "weight", "base": "bias", "scale": "factors"})
    ),
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """GLM-5's names and HY 4's own, with no rotary rows interleaved."""
    return deepseek.tensors({**values, "rope_interleave": False}).extended(*_RULES)


FAMILIES = (
    Family(
        "hy_v4",
        "HYV4",
        read,
        tensors,
        defaults={
            **deepseek.V32_DEFAULTS,
            "rope_interleave": False,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 262_144,
            "first_k_dense_replace": 1,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 768,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "index_n_heads": 16,
            "index_topk_freq": 4,
            "indexer_types": None,
            "hc_mult": 4,
            "hc_magnitude": 2.0,
            "hc_eps": 1e-6,
            "swiglu_limit": 10.0,
            "bos_token_id": 120_000,
            "eos_token_id": 120_025,
            "pad_token_id": 120_002,
        },
        write=write,
        # Of drawing new weights.
        harmless=frozenset(("learnable_sink_init", "mlp_bias")),
    ),
)
