"""LongT5 (Guo et al. 2022): T5 whose encoder sees a window, and with ``"transient-global"`` the sum
of every block of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    BlockSumsAttentionConfig,
    InitialConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.families import t5
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Rule, Tensors

_KINDS = {"local": "LocalSelfAttention", "transient-global": "TransientGlobalSelfAttention"}
_INTO: tuple[dict[str, str], ...] = (
    {"wi": "up_proj", "wo": "down_proj"},
    {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"},
)


def read(keys: Keys) -> TransformerConfig:
    config = t5.read(keys, scales=True)
    radius, size = keys.size("local_radius"), keys.size("global_block_size")
    kind = keys.choice("encoder_attention_type", {name: name for name in _KINDS})
    if kind != "local" and size & (size - 1):
        wanted = "a power of two: transformers' blocks of other sizes depend on how it rounds"
        raise keys.refused("global_block_size", size, wanted)
    bias = config.encoder.relative_bias

    def windowed(i: int, layer: LayerConfig) -> LayerConfig:
        plain = layer.attention
        assert isinstance(plain, AttentionConfig)
        assert bias is not None
        plain = replace(plain, window=radius + 1, window_ahead=radius)
        if kind == "local":
            return replace(layer, attention=plain)
        heads = BlockSumsAttentionConfig(
            plain.num_heads,
            plain.num_kv_heads,
            plain.head_dim,
            scale=plain.scale,
            dropout=plain.dropout,
            window=plain.window,
            window_ahead=radius,
            block_size=size,
            sums_norm=layer.norm,
            sums_bias=bias,
            sums_bias_of=0 if i else None,
        )
        return replace(layer, attention=heads)

    layers = tuple(windowed(i, layer) for i, layer in enumerate(config.encoder_layers))
    return replace(config, encoder_layers=layers)


def write(config: TransformerConfig) -> dict[str, Any]:
    heads: Any = config.encoder_layers[0].attention
    sums = isinstance(heads, BlockSumsAttentionConfig)
    return {
        **t5.write(config),
        "scale_decoder_outputs": config.logit_scale != 1.0,
        "local_radius": heads.attention_span.ahead,
        "encoder_attention_type": "transient-global" if sums else "local",
        **({"global_block_size": heads.block_size} if sums else {}),
    }


_TABLES = {
    (kind, gated): Tensors(
        (
            Rule(
                f"encoder.block.0.layer.0.{name}.global_relative_attention_bias.weight",
                "encoder_layers.0.attention.sums_bias",
            ),
            Rule(
                f"encoder.block.{{i}}.layer.0.{name}.global_input_layer_norm",
                "encoder_layers.{i}.attention.sums_norm",
            ),
            *t5.SHARED,
            *t5.tables(_INTO[gated], encoder=name),
        ),
        prefix="",
        dropped=t5.DROPPED,
    )
    for kind, name in _KINDS.items()
    for gated in (False, True)
}


def table(values: Mapping[str, Any]) -> Tensors:
    kind = str(values.get("encoder_attention_type", "local"))
    gated = str(values.get("feed_forward_proj", "relu")).startswith("gated-")
    return _TABLES[kind if kind in _KINDS else "local", bool(values.get("is_gated_act", gated))]


FAMILIES = (
    Family(
        "longt5",
        "LongT5",
        read,
        table,
        initial=InitialConfig("width", 1.0),
        initial_key="initializer_factor",
        defaults={
            **t5.DEFAULTS,
            "feed_forward_proj": "relu",
            "local_radius": 127,
            "global_block_size": 16,
            "encoder_attention_type": "local",
        },
        write=write,
        aliases=t5.ALIASES,
        not_supported=t5.NOT_SUPPORTED,
        harmless=t5.HARMLESS,
        with_head="ForConditionalGeneration",
        observed=t5.observed,
    ),
)
