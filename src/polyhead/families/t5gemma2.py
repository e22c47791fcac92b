"""T5Gemma 2 (text; Zhang et al. 2025): two stacks of Gemma 3's layers, whose decoder attends to its
own tokens and to the encoder's in one softmax.

config.json has a configuration for either stack, that of the encoder inside one with a vision
tower. A window of w tokens in the encoder is of (w + 1) // 2 behind, the query itself included, and
w // 2 ahead. The token that ends an image has a vector of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    EncoderConfig,
    LayerConfig,
    MergedAttentionConfig,
    TransformerConfig,
)
from polyhead.families import gemma3
from polyhead.families.common.config_json import HARMLESS
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_head
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.common.wrappers import OF_OTHERS
from polyhead.families.t5gemma import read_ids, read_stack, rules_of, write_stack

_GEMMA_3 = gemma3.FAMILIES[0]
_END_OF_IMAGE = 256_000
_NO_TOWER = {
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_hidden_layers": 0,
    "image_size": 16,
    "patch_size": 1,
    "vision_use_head": False,
}
"""The least vision tower that transformers' class can be built with."""


def read(keys: Keys) -> TransformerConfig:
    outer = keys.take("encoder")
    if not isinstance(outer, Mapping):
        raise keys.refused("encoder", outer, "an object")
    inner = Keys(outer, f"{keys.where}: encoder")
    encoder = read_stack(keys, "encoder: text_config", inner.take("text_config"), _GEMMA_3)
    decoder = read_stack(keys, "decoder", keys.take("decoder"), _GEMMA_3)
    end_of_image = inner.whole("eoi_token_index", _END_OF_IMAGE)
    inner.expect("is_encoder_decoder", False, None)
    inner.finish(HARMLESS | OF_OTHERS | {"model_type", "tie_word_embeddings"})
    for what in ("vocab_size", "embed_dim", "final_norm"):
        if (found := getattr(encoder, what)) != (wanted := getattr(decoder, what)):
            raise keys.refused("encoder", f"one with {what}={found}", f"the decoder's {wanted}")
    embedding = replace(decoder.embedding, own_vector=end_of_image)
    own = None if keys.flag("tie_word_embeddings") else embedding
    return replace(
        decoder,
        kind="encoder-decoder",
        layers=tuple(_merged(layer) for layer in decoder.layers),
        encoder_layers=tuple(_both_ways(layer) for layer in encoder.layers),
        embedding=embedding,
        encoder=EncoderConfig(own, own_tokens=own is not None, max_positions=encoder.max_positions),
        head=read_head(keys),
        **read_ids(keys, decoder),
    )


def _merged(layer: LayerConfig) -> LayerConfig:
    return replace(layer, attention=MergedAttentionConfig(**vars(layer.attention)))


def _both_ways(layer: LayerConfig) -> LayerConfig:
    attention: Any = layer.attention
    if (window := attention.window) is None:
        return layer
    two_sided = replace(attention, window=(window + 1) // 2, window_ahead=window // 2)
    return replace(layer, attention=two_sided)


def _one_way(layer: LayerConfig) -> LayerConfig:
    """Of either stack, as the file has it."""
    attention = AttentionConfig(**vars(layer.attention))
    if attention.window is not None:
        window = attention.window + (attention.window_ahead or 0)
        attention = replace(attention, window=window, window_ahead=None)
    return replace(layer, attention=attention)


def write(config: TransformerConfig) -> dict[str, Any]:
    own = config.encoder
    alone: dict[str, Any] = {"kind": "decoder", "encoder_layers": (), "encoder": EncoderConfig()}
    decoder = replace(config, **alone, layers=tuple(_one_way(each) for each in config.layers))
    encoder = replace(
        decoder,
        max_positions=own.max_positions or config.max_positions,
        layers=tuple(_one_way(each) for each in config.encoder_layers),
    )
    return {
        "encoder": {
            "text_config": write_stack(encoder, _GEMMA_3),
            "vision_config": _NO_TOWER,
            "eoi_token_index": config.embedding.own_vector,
        },
        "decoder": write_stack(decoder, _GEMMA_3),
        "dropout_rate": config.embedding.dropout,
        "tie_word_embeddings": not own.own_tokens,
    }


def _tensors(values: Mapping[str, Any]) -> Tensors:
    """Both stacks' tokens are one table, unless the file says that nothing is tied."""
    tied = values.get("tie_word_embeddings") is not False
    tokens: list[Rule] = []
    for side, ours in (("encoder", "" if tied else "encoder_"), ("decoder", "")):
        tokens += [
            Rule(f"{side}.embed_tokens.eoi_embedding", f"{ours}embedding.own_vector"),
            Rule(f"{side}.embed_tokens", f"{ours}embedding.tokens"),
        ]
    parts = "self_attn", "feedforward"
    rules = [*tokens, *rules_of("encoder", "encoder_", *parts), *rules_of("decoder", "", *parts)]
    # Some files have the module of the text model, others do not.
    rules += [
        Rule(rule.theirs.replace("encoder.", "encoder.text_model.", 1), rule.ours)
        for rule in rules
        if rule.theirs.startswith("encoder.")
    ]
    return Tensors(
        tuple(rules),
        outside=(Rule("lm_head.out_proj", "head"),),
        left_out=("encoder.vision_tower", "encoder.multi_modal_projector"),
    )


FAMILIES = (
    Family(
        "t5gemma2",
        "T5Gemma2",
        read,
        _tensors,
        defaults={"dropout_rate": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True},
        write=write,
        harmless=OF_OTHERS | {"classifier_dropout_rate"},
        with_head="ForConditionalGeneration",
    ),
)
