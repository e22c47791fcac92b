"""Gemma 1 and 2 (2024): norms by one plus the stored weight, embeddings scaled by √E; 2 has norms
on both sides, softcaps, and windows in every other layer. VaultGemma (2025, trained with
differential privacy) is 2 with norms before its parts alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
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
    read_network,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER, SANDWICH
from polyhead.families.common.tensors import Rule
from polyhead.families.common.writing import write_activation

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_NOT_SUPPORTED = {"use_bidirectional_attention": "only causal attention is built"}


def read(
    keys: Keys, *, second: bool, placement: Literal["pre", "sandwich"] = "sandwich"
) -> TransformerConfig:
    sizes = read_sizes(keys)
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased, out_bias=biased, rope=rope, dropout=keys.number("attention_dropout")
    )
    if second:
        layers, cap = _second(keys, attention, norm, sizes.num_layers, placement)
    else:
        keys.expect("hidden_activation", None, "gelu_pytorch_tanh")
        layers, cap = [LayerConfig(attention, read_network(keys), norm)] * sizes.num_layers, None
    return read_decoder(
        keys,
        layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
        embedding=EmbeddingConfig(scale=math.sqrt(sizes.embed_dim)),
        logit_softcap=cap,
    )


def _second(
    keys: Keys,
    attention: Any,
    norm: NormConfig,
    count: int,
    placement: Literal["pre", "sandwich"],
) -> tuple[list[LayerConfig], float | None]:
    """Gemma 2's layers, and the softcap of its logits."""
    scalar, window = keys.positive("query_pre_attn_scalar"), keys.whole("sliding_window", None)
    attention = replace(
        attention,
        scale=None if scalar == attention.head_dim else scalar**-0.5,
        softcap=keys.number("attn_logit_softcapping", None),
    )
    network = FeedForwardConfig(
        keys.whole("intermediate_size"), activation=read_activation(keys, "hidden_activation")
    )
    default = [FULL if i % 2 else SLIDING for i in range(count)]
    kinds = read_layer_types(keys, count, default)
    if SLIDING in kinds and window is None:
        raise keys.refused("sliding_window", window, "a number of keys, as layer_types has windows")
    of_kind = {FULL: attention, SLIDING: replace(attention, window=window)}
    layers = [LayerConfig(of_kind[kind], network, norm, placement) for kind in kinds]
    return layers, keys.number("final_logit_softcapping", None)


def write_second(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    network: Any = config.layers[0].feed_forward
    scale = layers[0].scale
    return {
        "hidden_activation": write_activation(network.activation),
        "query_pre_attn_scalar": layers[0].head_dim if scale is None else round(scale**-2),
        "attn_logit_softcapping": layers[0].softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": next((layer.window for layer in layers if layer.window), 4096),
    }


def _scale_of_second(values: Mapping[str, Any]) -> dict[str, Any]:
    """The format does not say the scale: of the largest model it is that of the width."""
    head_dim = values["hidden_size"] // max(1, values["num_attention_heads"])
    largest = values["num_hidden_layers"] == _LAYERS_OF_27B
    return {"query_pre_attn_scalar": head_dim if largest else values.get("head_dim", head_dim)}


_LAYERS_OF_27B = 46
_OF_SECOND = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

FAMILIES = (
    Family(
        "gemma",
        "Gemma",
        lambda keys: read(keys, second=False),
        DECODER,
        defaults=_DEFAULTS | {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
        not_supported=_NOT_SUPPORTED,
        gguf=Gguf("gemma", norms=1.0),
    ),
    Family(
        "gemma2",
        "Gemma2",
        lambda keys: read(keys, second=True),
        SANDWICH,
        defaults=_DEFAULTS | _OF_SECOND,
        write=write_second,
        not_supported=_NOT_SUPPORTED,
        gguf=Gguf("gemma2", norms=1.0, values=_scale_of_second),
    ),
    Family(
        "vaultgemma",
        "VaultGemma",
        lambda keys: read(keys, second=True, placement="pre"),
        DECODER.extended(
            Rule("layers.{i}.pre_feedforward_layernorm", "layers.{i}.feed_forward_norm")
        ),
        defaults=_DEFAULTS | _OF_SECOND,
        write=write_second,
        not_supported=_NOT_SUPPORTED,
    ),
)
