"""BigBird (Zaheer et al. 2020): BERT, and beside Pegasus's decoder, with blocks of tokens.

With ``attention_type="original_full"`` every token sees all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    GlobalBlocksAttentionConfig,
    HeadTransformConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.families import bart
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    ONLY_ENCODER,
    POSITIONS,
    PREDICTIONS,
    read_embedding,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import (
    ANSWERS,
    CLASSIFICATION_HEAD,
    MASKED,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under

_FULL, _BLOCKS = "original_full", "block_sparse"


def in_blocks(keys: Keys, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Layers whose attention sees everything, or blocks where the file says so."""
    kind = keys.choice("attention_type", {name: name for name in (_FULL, _BLOCKS)})
    size, again = keys.size("block_size"), keys.size("num_random_blocks")
    if kind == _FULL:
        return layers

    def blocks(layer: LayerConfig) -> LayerConfig:
        plain = layer.attention
        assert isinstance(plain, AttentionConfig)
        given = {each.name: getattr(plain, each.name) for each in fields(plain)}
        heads = GlobalBlocksAttentionConfig(**given, block_size=size, first_again=again)
        return replace(layer, attention=heads)

    return tuple(map(blocks, layers))


def write_blocks(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """The inverse of ``in_blocks``, and of ``use_bias``."""
    heads: Any = layers[0].attention
    written = {"use_bias": heads.qkv_bias, "attention_type": _FULL}
    if isinstance(heads, GlobalBlocksAttentionConfig):
        sizes = {"block_size": heads.block_size, "num_random_blocks": heads.first_again}
        written |= {"attention_type": _BLOCKS, **sizes}
    return written


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    activation = read_activation(keys)
    layers = read_layers(keys, sizes, norm, qkv_bias=keys.flag("use_bias"))
    scale = math.sqrt(sizes.embed_dim) if keys.flag("rescale_embeddings") else 1.0
    return read_encoder(
        keys,
        in_blocks(keys, layers),
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, norm, scale=scale),
        **read_head(
            keys,
            HeadTransformConfig(None, activation, norm=norm),
            pooled=(HeadTransformConfig(activation=activation),),
            # Its head is a layer of its own, and subtracts from the logits of the question.
            without=(ANSWERS,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    written = write_head(config, "BigBird")
    scaled = config.embedding.scale != 1.0
    return {**written, **write_blocks(config.layers), "rescale_embeddings": scaled}


HEADS = Heads(
    "cls.predictions.decoder",
    "cls.predictions.bias",
    PREDICTIONS,
    texts=CLASSIFICATION_HEAD,
    beside={r"cls\.seq_relationship\..+": "says whether two texts follow on, beside the logits"},
    others=r"cls\..+",
    dropped={
        **POSITIONS,
        r"pooler\.(weight|bias)": "comes after the hidden states",
        r"embeddings\.token_type_ids": "0, 0, 0, ...",
    },
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, (*EMBEDDINGS, *LAYERS), "bert.")


def read_pegasus(keys: Keys) -> TransformerConfig:
    config = bart.read(keys, EmbeddingConfig("learned"), first=True)
    biased = keys.flag("use_bias")

    def heads(layer: LayerConfig) -> LayerConfig:
        given: dict[str, Any] = {"qkv_bias": biased, "out_bias": biased}
        crossed: Any = layer.cross_attention
        return replace(
            layer,
            attention=replace(layer.attention, **given),
            cross_attention=None if crossed is None else replace(crossed, **given),
        )

    return replace(
        config,
        layers=tuple(map(heads, config.layers)),
        encoder_layers=in_blocks(keys, tuple(map(heads, config.encoder_layers))),
    )


def write_pegasus(config: TransformerConfig) -> dict[str, Any]:
    return {**bart.write(config), **write_blocks(config.encoder_layers)}


_PEGASUS = (
    *under(
        "encoder.layers.{i}.self_attn.",
        "encoder_layers.{i}.attention.",
        {
            "self.query": "q_proj",
            "self.key": "k_proj",
            "self.value": "v_proj",
            "output": "o_proj",
        },
    ),
    Rule("encoder.layernorm_embedding", "encoder_final_norm"),
    Rule("decoder.layernorm_embedding", "final_norm"),
)


def table_pegasus(values: Mapping[str, Any]) -> Tensors:
    return bart.table(values, dropped={}).extended(*_PEGASUS)


_BLOCKED = {"attention_type": _BLOCKS, "block_size": 64, "num_random_blocks": 3}

FAMILIES = (
    Family(
        "big_bird",
        "BigBird",
        read,
        table,
        defaults={
            **DEFAULTS,
            **_BLOCKED,
            "hidden_act": "gelu_new",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_bias": True,
            "rescale_embeddings": False,
        },
        write=write,
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
        harmless=frozenset(("sep_token_id",)),
    ),
    bart.sister(
        "bigbird_pegasus",
        "BigBirdPegasus",
        read_pegasus,
        tensors=table_pegasus,
        write=write_pegasus,
        defaults={
            **_BLOCKED,
            "hidden_act": "gelu_new",
            "scale_embedding": True,
            "use_bias": False,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
)
