"""Longformer (Beltagy et al. 2020): RoBERTa's encoder with windows and global tokens.

A call names its global tokens; a model of the classes of a text has its first token where it does
not. LED, the same beside BART's decoder, is in ``led.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import (
    AttentionConfig,
    GlobalWindowAttentionConfig,
    HeadTransformConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.families import roberta
from polyhead.families.bert import LAYERS, POOLER, read_embedding, read_encoder, read_layers
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import MASKED, PRE_TRAINING, SEQUENCE, ending, read_head
from polyhead.families.common.tensors import under


def read_windows(keys: Keys, num_layers: int) -> list[int]:
    """``attention_window``, of every layer: both sides, without the token itself."""
    said = keys.take("attention_window")
    windows = said if isinstance(said, list) else [said] * num_layers
    if len(windows) != num_layers or any(
        type(each) is not int or each < 2 or each % 2 for each in windows
    ):
        raise keys.refused("attention_window", said, f"an even number, or {num_layers} of them")
    return windows


def windowed(layer: LayerConfig, window: int, *, first: bool = False) -> LayerConfig:
    """The layer with a window and global tokens.

    Args:
        layer: One whose attention sees everything.
        window: As config.json says it.
        first: Whether the first token is global where a call names none.
    """
    plain = layer.attention
    assert isinstance(plain, AttentionConfig)
    heads = GlobalWindowAttentionConfig(
        plain.num_heads,
        plain.num_kv_heads,
        plain.head_dim,
        qkv_bias=True,
        out_bias=True,
        dropout=plain.dropout,
        window=window // 2 + 1,
        window_ahead=window // 2,
        global_first=first,
    )
    return replace(layer, attention=heads)


def write_windows(layers: tuple[LayerConfig, ...]) -> list[int]:
    """The inverse of ``read_windows``."""
    return [2 * (layer.attention.attention_span.ahead or 0) for layer in layers]


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    offset = roberta.read_offset(keys, sizes.max_positions)
    first = ending(keys.take("architectures", None)) == SEQUENCE
    layers = read_layers(keys, sizes, norm)
    windows = read_windows(keys, len(layers))
    return read_encoder(
        keys,
        tuple(windowed(each, w, first=first) for each, w in zip(layers, windows, strict=True)),
        max_positions=sizes.max_positions - offset,
        embedding=read_embedding(keys, norm, position_offset=offset),
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=norm),
            pooled=(POOLER,),
            without=(PRE_TRAINING,),
        ),
    )


def write(config: TransformerConfig) -> Mapping[str, Any]:
    written = roberta.write("Longformer", config)
    del written["position_embedding_type"]
    return {**written, "attention_window": write_windows(config.layers)}


GLOBALS = under(
    "encoder.layer.{i}.attention.self.",
    "layers.{i}.attention.",
    {
        "query_global": "q_global_proj",
        "key_global": "k_global_proj",
        "value_global": "v_global_proj",
    },
)

FAMILIES = (
    Family(
        "longformer",
        "Longformer",
        read,
        partial(roberta.table, (*LAYERS, *GLOBALS), "longformer."),
        defaults={**roberta.FAIRSEQ, "attention_window": 512},
        write=write,
        with_head=MASKED,
        harmless=frozenset(("sep_token_id", "onnx_export", "ignore_attention_mask")),
    ),
)
