"""LFM3 (Liquid AI, 2026): short convolutions of seven tokens, layers with windows, and some that
see everything and rotate a part of their pairs; norms on both sides, and a gate for each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    GatedAttentionConfig,
    LayerConfig,
    QKNormConfig,
    ShortConvolutionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import PLAIN_DEFAULTS, write_ropes_of_kinds
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes_of_kinds
from polyhead.families.common.tables import ATTENTION
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.lfm2 import TENSORS as LFM2

_CONV = "conv"
_LAYER = "layers.{i}."
_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def default_types(count: int) -> list[str]:
    """What layers are where the file does not say."""
    return [FULL if i % 4 == 2 else _CONV if i % 4 or not i else SLIDING for i in range(count)]


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    count = sizes.num_layers
    kinds = read_layer_types(keys, count, default_types(count), (FULL, SLIDING, _CONV))
    ropes = read_ropes_of_kinds(keys, sizes.head_dim, sizes.max_positions, _ROPES)
    gate: dict[str, Any] = {"kind": GatedAttentionConfig, "gate_per": "head", "gate_bias": False}
    biased = keys.flag("attention_bias")
    full = sizes.attention(
        **(gate if keys.flag("use_attention_gate") else {}),
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        rope=ropes[FULL],
        dropout=keys.number("attention_dropout"),
    )
    near = replace(full, rope=ropes[SLIDING], window=keys.size("sliding_window"))
    convolution = ShortConvolutionConfig(
        width=sizes.embed_dim,
        conv_kernel=keys.whole("conv_L_cache"),
        bias=keys.flag("conv_bias"),
    )
    of_kind = {FULL: full, SLIDING: near, _CONV: convolution}
    network = FeedForwardConfig(keys.size("intermediate_size"), "silu")
    placement: Any = "sandwich" if keys.flag("use_sandwich_norm") else "pre"
    rope = ropes[FULL]
    return read_decoder(
        keys,
        [LayerConfig(of_kind[kind], network, norm, norm_placement=placement) for kind in kinds],
        max_positions=sizes.max_positions if rope is None else reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    heads = [each for each in found if each.kind != "short_convolution"]
    convolution = next((each for each in found if each.kind == "short_convolution"), None)
    if not heads:
        raise ConfigError("this family needs a layer of attention: got none")
    kinds = {"short_convolution": _CONV}
    return {
        **write_ropes_of_kinds(config, 256),
        "layer_types": [
            kinds.get(each.kind, FULL if each.visible_window is None else SLIDING) for each in found
        ],
        "conv_L_cache": 7 if convolution is None else convolution.conv_kernel,
        "conv_bias": convolution is not None and convolution.bias,
        "use_attention_gate": heads[0].kind == "gated",
        "use_sandwich_norm": config.layers[0].norm_placement == "sandwich",
    }


_TENSORS = LFM2.extended(
    *under(
        _LAYER,
        _LAYER,
        {
            "post_operator_norm": "attention_out_norm",
            "post_ffn_norm": "feed_forward_out_norm",
            "self_attn.gate_proj": "attention.gate_proj",
        },
    ),
    *ATTENTION,
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The output projection's name depends on what a layer is."""
    kinds = values.get("layer_types") or default_types(values["num_hidden_layers"])
    return _TENSORS.extended(
        *(
            Rule(f"layers.{i}.conv.out_proj", f"layers.{i}.attention.o_proj")
            for i, kind in enumerate(kinds)
            if kind == _CONV
        )
    )


FAMILIES = (
    Family(
        "lfm3",
        "Lfm3",
        read,
        tensors,
        defaults={key: value for key, value in PLAIN_DEFAULTS.items() if key != "hidden_act"}
        | {
            "vocab_size": 128_000,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 256,
            "conv_bias": False,
            "conv_L_cache": 7,
            "layer_types": None,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
            "bos_token_id": 124_894,
            "eos_token_id": 124_900,
            "pad_token_id": 124_893,
        },
        aliases={"rms_norm_eps": "norm_eps"},
        write=write,
    ),
)
