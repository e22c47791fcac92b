"""Gemma 3 (text): its keys of config.json.

Five of six layers see a sliding window and rotate with a base of their own; every sixth sees
everything. Norms stand before and after attention and network, and multiply by one plus the stored
weight; queries and keys are normalized per head; embeddings are scaled by √E (Gemma 3, 2025, §2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_activation,
    read_decoder,
    read_layer_types,
    read_sizes,
)
from polyhead.families.common.rope import read_rope, read_ropes, write_rope, write_ropes
from polyhead.families.common.tables import SANDWICH
from polyhead.families.common.writing import write_activation

_PATTERN = 6
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
_LAYERS_OF_27B = 62


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
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
    "sliding_window_pattern": _PATTERN,
    "final_logit_softcapping": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def read(keys: Keys) -> TransformerConfig:
    sizes = read_sizes(keys)
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    keys.take("_sliding_window_pattern", None)  # follows from layer_types
    biased, scalar = keys.flag("attention_bias"), keys.positive("query_pre_attn_scalar")
    ropes = read_both_ropes(keys, sizes.head_dim, sizes.max_positions)
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        scale=None if scalar == sizes.head_dim else scalar**-0.5,
        dropout=keys.number("attention_dropout"),
    )
    network = FeedForwardConfig(
        keys.whole("intermediate_size"), activation=read_activation(keys, "hidden_activation")
    )
    window, pattern = keys.whole("sliding_window", None), keys.whole("sliding_window_pattern")
    if pattern < 1:
        raise keys.refused("sliding_window_pattern", pattern, "at least 1 layer")
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(sizes.num_layers)]
    kinds = read_layer_types(keys, sizes.num_layers, default)
    if SLIDING in kinds and window is None:
        raise keys.refused("sliding_window", window, "a number of keys, as layer_types has windows")
    of_kind = {
        FULL: replace(attention, rope=ropes[FULL]),
        SLIDING: replace(attention, rope=ropes[SLIDING], window=window),
    }
    return read_decoder(
        keys,
        [LayerConfig(of_kind[kind], network, norm, norm_placement="sandwich") for kind in kinds],
        max_positions=sizes.max_positions,
        norm=norm,
        embedding=EmbeddingConfig(scale=math.sqrt(sizes.embed_dim)),
        logit_softcap=keys.number("final_logit_softcapping", None),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    layers: list[Any] = [layer.attention for layer in config.layers]
    scale, windows = layers[0].scale, [layer.window for layer in layers]
    return {
        "hidden_activation": write_activation(network.activation),
        "max_position_embeddings": config.max_positions,
        "query_pre_attn_scalar": layers[0].head_dim if scale is None else round(scale**-2),
        "final_logit_softcapping": config.logit_softcap,
        # transformers wants a number here even where no layer has a window.
        "sliding_window": next(filter(None, windows), DEFAULTS["sliding_window"]),
        **_write_ropes({layer.window is None: layer.rope for layer in layers}),
    }


def read_both_ropes(keys: Keys, head_dim: int, max_positions: int) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer, in both spellings."""
    values = keys.take("rope_parameters", None)
    if values is None:
        local = keys.number("rope_local_base_freq", _LOCAL_THETA)
        # In this spelling the scaling is the global layers' alone.
        old = {
            "rope_theta": keys.number("rope_theta", _GLOBAL_THETA),
            "rope_scaling": keys.take("rope_scaling", None),
        }
        full = read_rope(Keys(old, keys.where), head_dim, max_positions)
        return {FULL: full, SLIDING: RopeConfig(local)}
    return read_ropes(keys, head_dim, max_positions, {FULL: _GLOBAL_THETA, SLIDING: _LOCAL_THETA})


def _write_ropes(ropes: Mapping[bool, RopeConfig | None]) -> dict[str, Any]:
    """Keys of the rotary embedding in global (True) and local (False) layers, the older if
    possible."""
    full = ropes.get(True) or RopeConfig(_GLOBAL_THETA)
    local = ropes.get(False) or RopeConfig(_LOCAL_THETA)
    if local == RopeConfig(local.theta) and full.dim is None:
        return {**write_rope(full, 0), "rope_local_base_freq": local.theta}
    return write_ropes({FULL: full, SLIDING: local})


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The format does not say the scale. One size, known by its depth alone, has another than the
    usual; llama.cpp decides the same way.
    """
    head_dim = values["hidden_size"] // max(1, values["num_attention_heads"])
    largest = values["num_hidden_layers"] == _LAYERS_OF_27B
    scalar = head_dim if largest else values.get("head_dim", head_dim)
    return {"query_pre_attn_scalar": scalar, "model_type": "gemma3_text"}


FAMILIES = (
    Family(
        "gemma3_text",
        "Gemma3",
        read,
        SANDWICH,
        defaults=DEFAULTS,
        write=write,
        not_supported={
            "attn_logit_softcapping": "transformers reads it and does not apply it",
            "use_bidirectional_attention": "only causal attention is built",
        },
        bare="TextModel",
        gguf=Gguf(
            "gemma3",
            settings={
                "attention.sliding_window_pattern": "sliding_window_pattern",
                "rope.freq_base_swa": "rope_local_base_freq",
            },
            norms=1.0,
            values=_from_gguf,
        ),
    ),
)
