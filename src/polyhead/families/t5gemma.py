"""T5Gemma (Zhang et al. 2025): two stacks of Gemma 2's layers, the decoder's with cross-attention.

config.json has a configuration for either stack. A window of w tokens reaches as far ahead as back
in the encoder, w tokens either way beside the query itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import EncoderConfig, LayerConfig, TransformerConfig
from polyhead.families import gemma
from polyhead.families.common.config_json import HARMLESS
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_head, read_token_ids
from polyhead.families.common.tables import ATTENTION, NETWORK
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_common

_GEMMA_2 = next(family for family in gemma.FAMILIES if family.model_type == "gemma2")
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_ids"} | {
    "pad_token_id": "pad_token_id"
}
# Keys that both stacks take from the whole model, or from their position in it.
_OF_A_STACK = frozenset(("model_type", "dropout_rate", "is_decoder", "cross_attention_hidden_size"))


def read(keys: Keys) -> TransformerConfig:
    dropout = keys.number("dropout_rate")
    attention_dropout = keys.number("attention_dropout")
    encoder, decoder = (
        _stack(keys, side, attention_dropout, dropout) for side in ("encoder", "decoder")
    )
    if encoder.final_norm != decoder.final_norm:
        raise keys.refused("encoder", encoder.final_norm, "the rms_norm_eps of the decoder")
    keys.take("vocab_size", None)  # the stacks' own count
    ids = read_token_ids(keys)
    ids |= {field: getattr(decoder, field) for key, field in _IDS.items() if not keys.has(key)}
    return replace(
        decoder,
        kind="encoder-decoder",
        layers=tuple(_crossed(layer) for layer in decoder.layers),
        encoder_layers=tuple(_both_ways(layer) for layer in encoder.layers),
        encoder=EncoderConfig(
            encoder.embedding,
            own_tokens=True,
            vocab_size=encoder.vocab_size,
            embed_dim=encoder.embed_dim,
            max_positions=encoder.max_positions,
        ),
        head=read_head(keys),
        **ids,
    )


def _stack(keys: Keys, side: str, attention_dropout: float, dropout: float) -> TransformerConfig:
    """One of the two as Gemma 2 would have it."""
    values = keys.take(side)
    if not isinstance(values, Mapping):
        raise keys.refused(side, values, "an object")
    values = {**values, "attention_dropout": attention_dropout}
    own = Keys(values, f"{keys.where}: {side}", defaults=_GEMMA_2.defaults)
    config = gemma.read(own, second=True)
    own.finish(HARMLESS | _OF_A_STACK)
    layers = tuple(
        replace(
            layer, dropout=dropout, feed_forward=replace(_any(layer.feed_forward), dropout=dropout)
        )
        for layer in config.layers
    )
    return replace(config, layers=layers, embedding=replace(config.embedding, dropout=dropout))


def _any(data: Any) -> Any:
    """A part whose class the caller knows, without its type."""
    return data


def _crossed(layer: LayerConfig) -> LayerConfig:
    return replace(layer, cross_attention=replace(_any(layer.attention), rope=None, window=None))


def _both_ways(layer: LayerConfig) -> LayerConfig:
    attention = _any(layer.attention)
    if attention.window is None:
        return layer
    window = attention.window
    return replace(layer, attention=replace(attention, window=window + 1, window_ahead=window))


def _one_way(layer: LayerConfig) -> LayerConfig:
    attention = _any(layer.attention)
    if attention.window is None:
        return layer
    return replace(
        layer,
        attention=replace(attention, window=attention.window_ahead, window_ahead=None),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    own = config.encoder
    if own.vocab_size is None or own.embed_dim is None or own.embedding is None:
        return {}
    alone: dict[str, Any] = {"kind": "decoder", "encoder_layers": (), "encoder": EncoderConfig()}
    decoder = replace(
        config, **alone, layers=tuple(replace(each, cross_attention=None) for each in config.layers)
    )
    encoder = replace(
        decoder,
        vocab_size=own.vocab_size,
        embed_dim=own.embed_dim,
        max_positions=own.max_positions or config.max_positions,
        layers=tuple(_one_way(layer) for layer in config.encoder_layers),
        embedding=own.embedding,
    )
    return {
        "encoder": _written(encoder) | {"is_decoder": False},
        "decoder": _written(decoder) | {"is_decoder": True},
        "dropout_rate": config.embedding.dropout,
    }


def _written(config: TransformerConfig) -> dict[str, Any]:
    """A stack's own keys: those that Gemma 2's reader takes."""
    values = {**write_common(config), **gemma.write_second(config)}
    keys = Keys(values, "t5gemma", defaults=_GEMMA_2.defaults)
    gemma.read(keys, second=True)
    unread = {*keys.untaken()}
    return {key: value for key, value in values.items() if key not in unread}


def _rules() -> list[Rule]:
    rules: list[Rule] = []
    for side, ours, parts in (
        ("encoder", "encoder_", ("self_attn", "feedforward")),
        ("decoder", "", ("self_attn", "cross_attn", "feedforward")),
    ):
        named = {"self_attn": "attention", "cross_attn": "cross_attention"}
        rules += [
            Rule(f"{side}.embed_tokens", f"{ours}embedding.tokens"),
            Rule(f"{side}.norm", f"{ours}final_norm"),
            *(
                Rule(f"{side}.{rule.theirs}", ours + rule.ours[0])
                for rule in (*ATTENTION, *NETWORK)
            ),
        ]
        for part in parts:
            name = named.get(part, "feed_forward")
            rules += under(
                f"{side}.layers.{{i}}.",
                f"{ours}layers.{{i}}.",
                {
                    f"pre_{part}_layernorm": f"{name}_norm",
                    f"post_{part}_layernorm": f"{name}_out_norm",
                },
            )
    cross = {f"{each}_proj": f"{each}_proj" for each in "qkvo"}
    return [
        *rules,
        *under("decoder.layers.{i}.cross_attn.", "layers.{i}.cross_attention.", cross),
    ]


FAMILIES = (
    Family(
        "t5gemma",
        "T5Gemma",
        read,
        Tensors(tuple(_rules()), outside=(Rule("lm_head.out_proj", "head"),)),
        defaults={"dropout_rate": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True},
        write=write,
        harmless=frozenset(("classifier_dropout_rate",)),
        with_head="ForConditionalGeneration",
    ),
)
