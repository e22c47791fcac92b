"""T5 (Raffel et al. 2020), mT5 and UMT5: a learned bias by distance, no scale of the scores.

The first T5 has one matrix for tokens and logits and scales what it multiplies by 1/√E; version 1.1
and mT5 have a matrix for the logits alone and scale nothing. config.json does not tell them apart
reliably (mT5's says "tied" where transformers 5 wrote it), so the file's tensors do. The encoder
also comes alone (``T5EncoderModel``), as image generators have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderConfig,
    FeedForwardConfig,
    InitialConfig,
    LayerConfig,
    RelativeBiasConfig,
    TransformerConfig,
)
from polyhead.config.feed_forward import Activation
from polyhead.config.layout import Network
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    ACTIVATIONS,
    UNLIMITED,
    read_decoder,
    read_rms_norm,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

# "gated-gelu" has always been the approximation by tanh.
_FORMS: Mapping[str, tuple[Activation, bool]] = {
    **{name: (ours, False) for name, ours in ACTIVATIONS.items()},
    **{f"gated-{name}": (ours, True) for name, ours in ACTIVATIONS.items()},
    "gated-gelu": ("gelu_tanh", True),
}


def read_stacks(
    keys: Keys,
    networks: tuple[list[Network], list[Network]],
    *,
    scaled: bool,
    per_layer: bool = False,
    alone: bool = False,
) -> TransformerConfig:
    """T5 around the networks of the encoder's and of the decoder's layers, or its encoder.

    Args:
        keys: Keys of config.json.
        networks: One for each layer.
        scaled: Whether what makes the logits is multiplied by 1/√E.
        per_layer: Whether every layer has a bias of its own.
        alone: Whether there is an encoder alone.
    """
    heads, dropout = keys.size("num_attention_heads"), keys.number("hidden_dropout_prob")
    norm = read_rms_norm(keys)
    attention = AttentionConfig(heads, heads, keys.size("head_dim"), scale=1.0, dropout=dropout)
    bias = RelativeBiasConfig(
        keys.whole("relative_attention_num_buckets"),
        keys.whole("relative_attention_max_distance"),
        per_layer,
    )
    encoder, decoder = (
        tuple(
            LayerConfig(attention, network, norm, cross_attention=cross, dropout=dropout)
            for network in stack
        )
        for stack, cross in zip(networks, (None, attention), strict=True)
    )
    around: dict[str, Any] = {
        "max_positions": keys.whole("max_position_embeddings", UNLIMITED),
        "embedding": EmbeddingConfig(dropout=dropout),
        "relative_bias": bias,
    }
    if alone:
        return read_encoder(keys, encoder, final_norm=norm, head=None, **around)
    return read_decoder(
        keys,
        decoder,
        kind="encoder-decoder",
        norm=norm,
        encoder_layers=encoder,
        encoder=EncoderConfig(relative_bias=bias),
        logit_scale=keys.size("hidden_size") ** -0.5 if scaled else 1.0,
        **around,
    )


def _is_alone(architectures: object) -> bool:
    """Whether a file's class is the encoder's."""
    named = architectures if isinstance(architectures, list) and architectures else [""]
    return str(named[0]).endswith(ENCODER)


def depths(keys: Keys) -> tuple[int, int]:
    """Layers of the encoder and of the decoder, which has as many where the file does not say."""
    layers = keys.num_layers("num_hidden_layers")
    said = keys.take("num_decoder_layers", None) is not None
    return layers, keys.num_layers("num_decoder_layers") if said else layers


def read(keys: Keys, *, scales: bool, per_layer: bool = False) -> TransformerConfig:
    activation, gated = keys.choice("feed_forward_proj", _FORMS)
    if keys.has("dense_act_fn"):
        activation = keys.choice("dense_act_fn", ACTIVATIONS)
    network = FeedForwardConfig(
        keys.whole("intermediate_size"),
        activation,
        gated=keys.flag("is_gated_act", gated),
        dropout=keys.number("hidden_dropout_prob"),
    )
    encoder, decoder = depths(keys)
    tied = keys.flag("tie_word_embeddings")
    return read_stacks(
        keys,
        ([network] * encoder, [network] * decoder),
        scaled=scales and keys.flag("scale_decoder_outputs", tied),
        per_layer=per_layer,
        alone=_is_alone(keys.take("architectures", None)),
    )


def write_stacks(config: TransformerConfig) -> dict[str, Any]:
    bias = config.relative_bias
    if bias is None:
        return {}
    return {
        "num_layers": len(config.encoder_layers or config.layers),
        "num_decoder_layers": len(config.layers),
        "relative_attention_num_buckets": bias.num_buckets,
        "relative_attention_max_distance": bias.max_distance,
    }


def write(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    name = write_activation(network.activation)
    return {
        **write_stacks(config),
        "feed_forward_proj": f"gated-{name}" if network.gated else name,
        "dense_act_fn": name,
        "is_gated_act": network.gated,
    }


def _write(config: TransformerConfig, class_name: str) -> dict[str, Any]:
    """``write``, also of an encoder alone."""
    alone = {"architectures": [class_name + ENCODER]} if config.kind == "encoder" else {}
    return {**alone, **write(config)}


def observed(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Settings from tensors: a head in the file that differs from the tokens is untied."""
    head = tensors.get("lm_head.weight")
    tokens = next((tensors[name] for name in _TOKENS if name in tensors), None)
    own = head is not None and tokens is not None and not torch.equal(head, tokens)
    said = values.get("tie_word_embeddings") is not False
    return {
        "tie_word_embeddings": not own,
        "scale_decoder_outputs": values.get("scale_decoder_outputs", said),
    }


ENCODER = "EncoderModel"
_TOKENS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The format does not say the activation; llama.cpp decides the same way."""
    return {"feed_forward_proj": "gated-gelu" if values["is_gated_act"] else "relu"}


def _attention(theirs: str, ours: str) -> tuple[Rule, ...]:
    return under(f"{theirs}.", f"{ours}.", {each: f"{each}_proj" for each in "qkvo"})


def tables(
    network: Mapping[str, str],
    name: str = "DenseReluDense",
    *,
    per_layer: bool = False,
    encoder: str = "SelfAttention",
    alone: bool = False,
) -> tuple[Rule, ...]:
    """Rules of both stacks, or of the encoder's.

    Args:
        network: A layer's network: the file's names and polyhead's.
        name: Name of the module that has them.
        per_layer: Whether every layer has a bias of its own.
        encoder: Name of the module of the encoder's attention.
        alone: Whether there is an encoder alone.
    """
    rules: list[Rule] = []
    stacks = (("encoder", "" if alone else "encoder_", 1), ("decoder", "", 2))
    for side, ours, last in stacks[:1] if alone else stacks:
        layer, heads = f"{side}.block.{{i}}.layer.", encoder if last == 1 else "SelfAttention"
        number, biased = (
            ("{i}", f"{ours}relative_bias.{{i}}") if per_layer else ("0", f"{ours}relative_bias")
        )
        rules += [
            Rule(f"{side}.final_layer_norm", f"{ours}final_norm"),
            Rule(f"{side}.block.{number}.layer.0.{heads}.relative_attention_bias", biased),
            Rule(f"{layer}0.layer_norm", f"{ours}layers.{{i}}.attention_norm"),
            Rule(f"{layer}{last}.layer_norm", f"{ours}layers.{{i}}.feed_forward_norm"),
            *_attention(f"{layer}0.{heads}", f"{ours}layers.{{i}}.attention"),
            *under(f"{layer}{last}.{name}.", f"{ours}layers.{{i}}.feed_forward.", network),
        ]
    if alone:
        return tuple(rules)
    cross = "decoder.block.{i}.layer.1"
    return (
        *rules,
        Rule(f"{cross}.layer_norm", "layers.{i}.cross_attention_norm"),
        *_attention(f"{cross}.EncDecAttention", "layers.{i}.cross_attention"),
    )


DROPPED = {
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight": (
        "no class reads it; the first releases wrote it"
    )
}
SHARED = tuple(Rule(name.removesuffix(".weight"), "embedding.tokens") for name in _TOKENS)
_TABLES = {
    (gated, per_layer, alone): Tensors(
        (
            *SHARED,
            *tables({**into, "wo": "down_proj"}, per_layer=per_layer, alone=alone),
        ),
        prefix="",
        dropped=DROPPED,
    )
    for gated, into in (
        (False, {"wi": "up_proj"}),
        (True, {"wi_0": "gate_proj", "wi_1": "up_proj"}),
    )
    for per_layer in (False, True)
    for alone in (False, True)
}


def _tensors(values: Mapping[str, Any], form: str, *, per_layer: bool = False) -> Tensors:
    gated = str(values.get("feed_forward_proj", form)).startswith("gated-")
    alone = _is_alone(values.get("architectures"))
    return _TABLES[bool(values.get("is_gated_act", gated)), per_layer, alone]


ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_dropout_prob": "dropout_rate",
}
DEFAULTS = {
    "head_dim": 64,
    "num_decoder_layers": None,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "hidden_dropout_prob": 0.1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
NOT_SUPPORTED = {"is_decoder": "only encoder and decoder together are built"}
_SETTINGS = {
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "attention.layer_norm_epsilon": None,  # the same number as for RMSNorm
}
HARMLESS = frozenset(("n_positions", "output_past", "is_training"))

FAMILIES = (
    Family(
        "t5",
        "T5",
        lambda keys: read(keys, scales=True),
        lambda values: _tensors(values, "relu"),
        initial=InitialConfig("width", 1.0),
        initial_key="initializer_factor",
        defaults=DEFAULTS | {"feed_forward_proj": "relu"},
        write=lambda config: {
            **_write(config, "T5"),
            "scale_decoder_outputs": config.logit_scale != 1.0,
        },
        aliases=ALIASES,
        not_supported=NOT_SUPPORTED,
        harmless=HARMLESS,
        with_head="ForConditionalGeneration",
        observed=observed,
        gguf=Gguf(
            "t5",
            settings={
                **_SETTINGS,
                "decoder_block_count": "num_decoder_layers",
                "decoder_start_token_id": None,
            },
            values=_from_gguf,
        ),
        more_gguf=(
            Gguf(
                "t5encoder",
                settings=_SETTINGS,
                causal=False,
                values=lambda values: _from_gguf(values) | {"architectures": [f"T5{ENCODER}"]},
            ),
        ),
    ),
    Family(
        "mt5",
        "MT5",
        lambda keys: read(keys, scales=False),
        lambda values: _tensors(values, "gated-gelu"),
        initial=InitialConfig("width", 1.0),
        initial_key="initializer_factor",
        defaults=DEFAULTS | {"feed_forward_proj": "gated-gelu"},
        write=lambda config: _write(config, "MT5"),
        aliases=ALIASES,
        not_supported=NOT_SUPPORTED,
        harmless=HARMLESS | {"scale_decoder_outputs"},
        with_head="ForConditionalGeneration",
        observed=observed,
    ),
    Family(
        "umt5",
        "UMT5",
        lambda keys: read(keys, scales=True, per_layer=True),
        lambda values: _tensors(values, "gated-gelu", per_layer=True),
        initial=InitialConfig("width", 1.0),
        initial_key="initializer_factor",
        defaults={key: value for key, value in DEFAULTS.items() if key != "tie_word_embeddings"}
        | {"feed_forward_proj": "gated-gelu"},
        write=lambda config: {
            **_write(config, "UMT5"),
            "scale_decoder_outputs": config.logit_scale != 1.0,
        },
        aliases=ALIASES,
        not_supported=NOT_SUPPORTED,
        harmless=HARMLESS,
        with_head="ForConditionalGeneration",
        observed=observed,
    ),
)
