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
from polyhead.families.common.config_json import HARMLESS, read_keys
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
    encoder, decoder = (
        read_stack(keys, side, keys.take(side), _GEMMA_2) for side in ("encoder", "decoder")
    )
    if encoder.final_norm != decoder.final_norm:
        raise keys.refused("encoder", encoder.final_norm, "the rms_norm_eps of the decoder")
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
        **read_ids(keys, decoder),
    )


def read_ids(keys: Keys, decoder: TransformerConfig) -> dict[str, Any]:
    """Special tokens, the decoder's where the file says none of the whole."""
    keys.whole("vocab_size", None)  # the stacks have their own
    ids = read_token_ids(keys)
    return ids | {
        field: getattr(decoder, field) for key, field in _IDS.items() if not keys.has(key)
    }


def read_stack(keys: Keys, side: str, values: object, family: Family) -> TransformerConfig:
    """One of the two as a decoder of ``family`` would have it, with the dropout of the whole.

    Args:
        keys: Of the whole.
        side: What errors call it.
        values: Its object.
        family: Whose keys these are.
    """
    dropout, attention_dropout = keys.number("dropout_rate"), keys.number("attention_dropout")
    if not isinstance(values, Mapping):
        raise keys.refused(side, values, "an object")
    values = {**values, "attention_dropout": attention_dropout}
    own = Keys(values, f"{keys.where}: {side}", defaults=family.defaults)
    own.take("model_type", None)
    config = read_keys(own, family)
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
        "encoder": write_stack(encoder, _GEMMA_2) | {"is_decoder": False},
        "decoder": write_stack(decoder, _GEMMA_2) | {"is_decoder": True},
        "dropout_rate": config.embedding.dropout,
    }


def write_stack(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """A stack's own keys: those that the family's reader takes."""
    values = {**write_common(config), **family.write(config)}
    keys = Keys(values, family.model_type, defaults=family.defaults)
    family.read(keys)
    unread = {*keys.untaken()}
    return {key: value for key, value in values.items() if key not in unread}


def rules_of(side: str, ours: str, *parts: str) -> list[Rule]:
    """Rules of a stack but for its tokens, where ``parts`` have norms on both sides."""
    named = {"self_attn": "attention", "cross_attn": "cross_attention"}
    rules = [
        Rule(f"{side}.norm", f"{ours}final_norm"),
        *(Rule(f"{side}.{rule.theirs}", ours + rule.ours[0]) for rule in (*ATTENTION, *NETWORK)),
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
    return rules


def _rules() -> list[Rule]:
    cross = {f"{each}_proj": f"{each}_proj" for each in "qkvo"}
    return [
        Rule("encoder.embed_tokens", "encoder_embedding.tokens"),
        Rule("decoder.embed_tokens", "embedding.tokens"),
        *rules_of("encoder", "encoder_", "self_attn", "feedforward"),
        *rules_of("decoder", "", "self_attn", "cross_attn", "feedforward"),
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
