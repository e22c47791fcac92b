"""LED (Beltagy et al. 2020): Longformer's encoder beside BART's decoder, for long sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import EmbeddingConfig, TransformerConfig
from polyhead.families import bart
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.longformer import read_windows, windowed, write_windows

_MOST = "max_encoder_position_embeddings"


def read(keys: Keys) -> TransformerConfig:
    if keys.flag("scale_embedding"):
        raise keys.refused("scale_embedding", True, "false")
    config = bart.read(keys, EmbeddingConfig("learned", norm=bart.NORM), first=False)
    layers = config.encoder_layers
    windows = read_windows(keys, len(layers))
    return replace(
        config,
        encoder_layers=tuple(windowed(*each) for each in zip(layers, windows, strict=True)),
        encoder=replace(config.encoder, max_positions=keys.whole(_MOST)),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {
        **bart.write(config),
        "max_decoder_position_embeddings": config.max_positions,
        _MOST: config.encoder.max_positions,
        "attention_window": write_windows(config.encoder_layers),
    }


_ATTENTION = (
    *under(
        "encoder.layers.{i}.self_attn.longformer_self_attn.",
        "encoder_layers.{i}.attention.",
        {
            "query": "q_proj",
            "key": "k_proj",
            "value": "v_proj",
            "query_global": "q_global_proj",
            "key_global": "k_global_proj",
            "value_global": "v_global_proj",
        },
    ),
    Rule("encoder.layers.{i}.self_attn.output", "encoder_layers.{i}.attention.o_proj"),
)


def table(values: Mapping[str, Any]) -> Tensors:
    return replace(bart.table(values, dropped={}), prefix="led.").extended(*_ATTENTION)


FAMILIES = (
    bart.sister(
        "led",
        "LED",
        read,
        tensors=table,
        write=write,
        aliases={
            **bart.ALIASES,
            "max_position_embeddings": "max_decoder_position_embeddings",
        },
        defaults={
            "attention_window": 512,
            "max_encoder_position_embeddings": 16384,
            "max_position_embeddings": 1024,
        },
    ),
)
