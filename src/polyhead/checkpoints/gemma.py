"""Gemma 3 (text): its keys of config.json.

Five of six layers see a sliding window and rotate with a base of their own; every sixth sees
everything. Norms stand before and after attention and network, and multiply by one plus the stored
weight; queries and keys are normalised per head; embeddings are scaled by √E (Gemma 3, 2025, §2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.checkpoints.keys import Keys
from polyhead.checkpoints.rope_in import read_rope
from polyhead.checkpoints.rope_out import write_rope, write_scaling
from polyhead.checkpoints.shared_keys import (
    FULL,
    SLIDING,
    read_activation,
    read_decoder,
    read_layer_types,
    write_activation,
    write_decoder,
    write_layer_types,
)
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError

DEFAULT_PATTERN = 6
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0

DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": DEFAULT_PATTERN,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def read(keys: Keys) -> TransformerConfig:
    """The configuration that the keys mean.

    Raises:
        ConfigError: A key is missing, not understood or contradicts another, by name.
    """
    embed_dim, num_layers = keys.whole("hidden_size"), keys.num_layers("num_hidden_layers")
    max_positions, head_dim = keys.whole("max_position_embeddings"), keys.whole("head_dim")
    norm = norm_of(keys.number("rms_norm_eps"))
    # transformers reads the first of these two and applies neither.
    keys.expect("attn_logit_softcapping", None)
    keys.expect("use_bidirectional_attention", False, None)
    keys.take("_sliding_window_pattern", None)  # follows from layer_types
    biased = keys.flag("attention_bias")
    ropes = _read_ropes(keys, head_dim, max_positions)
    attention = AttentionConfig(
        num_heads=keys.whole("num_attention_heads"),
        num_kv_heads=keys.whole("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        scale=scale_of(keys.number("query_pre_attn_scalar"), head_dim),
        dropout=keys.number("attention_dropout"),
    )
    network = FeedForwardConfig(
        keys.whole("intermediate_size"), activation=read_activation(keys, "hidden_activation")
    )
    window, pattern = keys.whole("sliding_window", None), keys.whole("sliding_window_pattern")
    kinds = read_layer_types(keys, num_layers, layer_types(num_layers, pattern))
    if SLIDING in kinds and window is None:
        raise keys.refused("sliding_window", window, "a number of keys, as layer_types has windows")
    of_kind = {
        FULL: replace(attention, rope=ropes[FULL]),
        SLIDING: replace(attention, rope=ropes[SLIDING], window=window),
    }
    return read_decoder(
        keys,
        [LayerConfig(of_kind[kind], network, norm, norm_placement="sandwich") for kind in kinds],
        max_positions=max_positions,
        norm=norm,
        embedding=EmbeddingConfig(scale=math.sqrt(embed_dim)),
        logit_softcap=keys.number("final_logit_softcapping", None),
    )


def write(config: TransformerConfig, model_type: str, class_prefix: str) -> dict[str, Any]:
    """config.json's object, as far as the family can say it.

    Raises:
        ConfigError: The layers are not Gemma's.
    """
    attention, network = config.layers[0].attention, config.layers[0].feed_forward
    if not isinstance(attention, AttentionConfig) or not isinstance(network, FeedForwardConfig):
        raise ConfigError(f"attention={attention}, feed_forward={network}")
    layers = [
        layer.attention for layer in config.layers if isinstance(layer.attention, AttentionConfig)
    ]
    windows = [layer.window for layer in layers]
    scale = attention.scale
    return {
        **write_decoder(config, class_prefix, model_type),
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": network.hidden_dim,
        "hidden_activation": write_activation(network.activation),
        "max_position_embeddings": config.max_positions,
        "attention_bias": attention.qkv_bias,
        "query_pre_attn_scalar": attention.head_dim if scale is None else round(scale**-2),
        "final_logit_softcapping": config.logit_softcap,
        # transformers wants a number here even where no layer has a window.
        "sliding_window": next(filter(None, windows), DEFAULTS["sliding_window"]),
        "layer_types": write_layer_types(windows),
        **_write_ropes({layer.window is None: layer.rope for layer in layers}),
    }


def norm_of(eps: float) -> NormConfig:
    """Multiplies by one plus the stored weight."""
    return NormConfig("rmsnorm", eps=eps, weight_offset=1.0)


def scale_of(query_pre_attn_scalar: float, head_dim: int) -> float | None:
    """The factor of the scores; None where it is the usual one."""
    return None if query_pre_attn_scalar == head_dim else query_pre_attn_scalar**-0.5


def layer_types(num_layers: int, pattern: int) -> list[str]:
    """Windows in all but each ``pattern``-th layer.

    Raises:
        ConfigError: A pattern below 1.
    """
    if pattern < 1:
        raise ConfigError(f"sliding_window_pattern must be at least 1 layer: got {pattern}")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]


def _read_ropes(keys: Keys, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer, in both spellings."""
    values = keys.take("rope_parameters", None)
    if values is None:
        local = keys.number("rope_local_base_freq", LOCAL_THETA)
        # In this spelling the scaling is the global layers' alone.
        old = {
            "rope_theta": keys.number("rope_theta", GLOBAL_THETA),
            "rope_scaling": keys.take("rope_scaling", None),
        }
        full = read_rope(Keys(old, keys.where), head_dim, max_positions)
        return {FULL: full, SLIDING: RopeConfig(local)}
    thetas = {FULL: GLOBAL_THETA, SLIDING: LOCAL_THETA}
    if not isinstance(values, Mapping) or values.keys() - thetas:
        raise keys.refused("rope_parameters", values, f"an object with {' and '.join(thetas)}")
    ropes = {}
    for kind, theta in thetas.items():
        inner = values.get(kind) or {}
        if not isinstance(inner, Mapping):
            raise keys.refused(f"rope_parameters.{kind}", inner, "an object")
        one = Keys({"rope_parameters": {"rope_theta": theta, **inner}}, f"{keys.where}: {kind}")
        ropes[kind] = read_rope(one, head_dim, max_positions)
    return ropes


def _write_ropes(ropes: Mapping[bool, RopeConfig | None]) -> dict[str, Any]:
    """Of the global (True) and the local layers (False), in the older spelling where that can."""
    full = ropes.get(True) or RopeConfig(GLOBAL_THETA)
    local = ropes.get(False) or RopeConfig(LOCAL_THETA)
    if local == RopeConfig(local.theta) and full.dim is None:
        return {**write_rope(full, 0), "rope_local_base_freq": local.theta}
    return {
        "rope_parameters": {
            kind: {"rope_type": rope.type, "rope_theta": rope.theta, **write_scaling(rope)}
            for kind, rope in ((FULL, full), (SLIDING, local))
        }
    }
