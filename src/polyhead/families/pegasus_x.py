"""PEGASUS-X (Phang et al. 2022): an encoder of blocks, and of learned vectors that see all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    GlobalPrefixAttentionConfig,
    LayerConfig,
    SinusoidConfig,
    TransformerConfig,
)
from polyhead.families import bart
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Rule, Tensors, under

_PLAIN: dict[str, Any] = {"qkv_bias": False, "out_bias": False}


def read(keys: Keys) -> TransformerConfig:
    embedding = EmbeddingConfig("sinusoidal", sinusoid=SinusoidConfig("halves", spread=True))
    config = bart.read(keys, embedding, first=True, head_bias=False)
    size, prefix = keys.size("block_size"), keys.size("num_global_tokens")
    staggers = keys.flag("stagger_local_blocks")
    if staggers and size % 2:
        raise keys.refused("block_size", size, "an even number")

    def local(i: int, layer: LayerConfig) -> LayerConfig:
        plain = layer.attention
        assert isinstance(plain, AttentionConfig)
        heads = GlobalPrefixAttentionConfig(
            plain.num_heads,
            plain.num_kv_heads,
            plain.head_dim,
            dropout=plain.dropout,
            chunk=size,
            prefix=prefix,
            stagger=size // 2 if staggers and i % 2 else 0,
            norm=layer.norm,
        )
        return replace(layer, attention=heads, attention_norm=False)

    def full(layer: LayerConfig) -> LayerConfig:
        crossed: Any = layer.cross_attention
        return replace(
            layer,
            attention=replace(layer.attention, **_PLAIN),
            cross_attention=replace(crossed, **_PLAIN),
        )

    encoder: Any = config.encoder.embedding
    return replace(
        config,
        layers=tuple(map(full, config.layers)),
        encoder_layers=tuple(local(i, layer) for i, layer in enumerate(config.encoder_layers)),
        encoder=replace(config.encoder, embedding=replace(encoder, prefix=prefix)),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    heads: list[Any] = [layer.attention for layer in config.encoder_layers]
    return {
        **bart.write(config),
        "block_size": heads[0].chunk,
        "num_global_tokens": heads[0].prefix,
        "stagger_local_blocks": any(each.stagger for each in heads),
    }


_ENCODER = (
    Rule("encoder.embed_global.weight", "encoder_embedding.prefix"),
    *under(
        "encoder.layers.{i}.",
        "encoder_layers.{i}.attention.",
        {"self_attn_layer_norm": "norm", "global_self_attn_layer_norm": "global_norm"},
    ),
)


def table(values: Mapping[str, Any]) -> Tensors:
    return bart.table(values, dropped=bart.SINUSOIDS).extended(*_ENCODER)


FAMILIES = (
    bart.sister(
        "pegasus_x",
        "PegasusX",
        read,
        tensors=table,
        write=write,
        defaults={
            "scale_embedding": True,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            "block_size": 512,
            "num_global_tokens": 32,
            "stagger_local_blocks": True,
        },
    ),
)
