"""ZAYA1 (Zyphra 2025, arXiv 2511.17127): convolved queries and keys, a scaled residual stream, and
one expert of many, or none, that a router chooses which goes on from the layer before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import (
    ConvolutionalAttentionConfig,
    DepthAveragedMixtureConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    ScaledResidualConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import STACKED_EXPERTS
from polyhead.families.common.reading import (
    read_activation,
    read_decoder,
    read_layer_types,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes_of_kinds, stated_length, write_ropes
from polyhead.families.common.steps import Rows
from polyhead.families.common.tables import AROUND_LAYERS, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_ROPES = {
    _FULL: {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
# Queries and keys of length √head_dim; the file divides by their length, or 1e-7 where it is less.
_LENGTH = QKNormConfig(NormConfig(eps=1e-14, weight=False))


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, biased = read_sizes(keys), read_rms_norm(keys), keys.flag("attention_bias")
    kinds = read_layer_types(keys, sizes.num_layers, [_FULL] * sizes.num_layers, tuple(_ROPES))
    stated = keys.take("rope_parameters", None)
    if isinstance(stated, dict):  # published files have a type beside the kinds, which says nothing
        stated = {kind: each for kind, each in stated.items() if kind != "rope_type"}
    inner = Keys({"rope_parameters": stated}, keys.where)
    ropes = read_ropes_of_kinds(inner, sizes.head_dim, sizes.max_positions, _ROPES)
    full = ConvolutionalAttentionConfig(
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=_LENGTH,
        rope=ropes[_FULL],
        dropout=keys.number("attention_dropout"),
        depthwise_kernel=keys.size("cca_time0"),
        head_kernel=keys.size("cca_time1"),
    )
    window = keys.size("sliding_window", None)
    if window is None and _SLIDING in kinds:
        raise keys.refused("sliding_window", window, "a number of keys, as layer_types has windows")
    of_kind = {_FULL: full, _SLIDING: replace(full, rope=ropes[_SLIDING], window=window)}
    keys.expect("num_experts_per_tok", 1)
    first = DepthAveragedMixtureConfig(
        FeedForwardConfig(keys.size("moe_intermediate_size"), read_activation(keys)),
        keys.size("num_experts"),
        experts_per_token=1,
        choice_bias=True,
        router_dim=keys.size("router_hidden_size"),
        router_norm=norm,
    )
    layers = [
        LayerConfig(
            of_kind[kind], replace(first, reads_state=i > 0), norm, streams=ScaledResidualConfig()
        )
        for i, kind in enumerate(kinds)
    ]
    return read_decoder(
        keys,
        layers,
        max_positions=reach(_rope(layers[0]), sizes.max_positions),
        norm=norm,
        head_bias=keys.flag("lm_head_bias"),
    )


def _rope(layer: LayerConfig) -> Any:
    """By which a model's length is stated."""
    return layer.attention.rope


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    mixture: Any = config.layers[0].feed_forward
    if not all(each.kind == "convolutional" for each in found):
        raise ConfigError("this family's queries and keys are convolved")
    kinds = [_FULL if each.window is None else _SLIDING for each in found]
    ropes = {kind: each.rope for kind, each in zip(kinds, found, strict=True)}
    return {
        **write_ropes(ropes, found[0].head_dim),
        "max_position_embeddings": stated_length(_rope(config.layers[0]), config.max_positions),
        "layer_types": kinds,
        "lm_head_bias": config.head_bias,
        "router_hidden_size": mixture.router_dim,
        "cca_time0": found[0].depthwise_kernel,
        "cca_time1": found[0].head_kernel,
    }


_LAYER = "layers.{i}."
_SCALES = {
    "residual_scale": "scale",
    "residual_bias": "shift",
    "hidden_states_scale": "made_scale",
    "hidden_states_bias": "made_shift",
}
TENSORS = Tensors(
    (
        *AROUND_LAYERS,
        *under("input_hidden_states_", "streams.", {"scale": "scale", "bias": "shift"}),
        *NORMS,
        *under(
            _LAYER + "self_attn.",
            _LAYER + "attention.",
            {
                "qkv_proj.q_proj": "q_proj",
                "qkv_proj.k_proj": "k_proj",
                "qkv_proj.conv_qk_depthwise": "depthwise",
                "qkv_proj.conv_qk_grouped": "per_head",
                "qk_norm.temp": "key_scale",
                "o_proj": "o_proj",
            },
        ),
        *(
            Rule(
                f"{_LAYER}self_attn.qkv_proj.v_proj_{{part}}.{leaf}",
                f"{_LAYER}attention.v_proj.{leaf}",
                parts=("current", "delayed"),
                cut=Rows(),
            )
            for leaf in ("weight", "bias")
        ),
        *under(_LAYER + "post_attention_residual_scale.", _LAYER + "attention_streams.", _SCALES),
        *under(_LAYER + "post_mlp_residual_scale.", _LAYER + "feed_forward_streams.", _SCALES),
        *under(
            _LAYER + "mlp.gate.",
            _LAYER + "feed_forward.",
            {
                "down_proj": "state_proj",
                "router_states_scale": "state_scale",
                "router_mlp.norm": "router_norm",
                "router_mlp.fc1": "router_layers.0",
                "router_mlp.fc2": "router_layers.1",
                "router_mlp.out_proj": "router",
                "balancing_biases": "choice_bias",
            },
        ),
        *STACKED_EXPERTS,
    )
)

FAMILIES = (
    Family(
        "zaya",
        "Zaya",
        read,
        TENSORS,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": None,
            "sliding_window": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 1,
            "num_experts": 16,
            "layer_types": None,
            "lm_head_bias": False,
            "router_hidden_size": 256,
            "cca_time0": 2,
            "cca_time1": 2,
            "bos_token_id": 2,
            "eos_token_id": 106,
            "pad_token_id": 0,
        },
        write=write,
        harmless=frozenset(("output_router_logits",)),
    ),
)
