"""BART (Lewis et al. 2020) and related models: encoder-decoders as fairseq builds them.

They differ in where norms stand, in the positions, and in whether the embedding is normalized.
MVP (Tang et al. 2022) without its prompts is BART.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    SinusoidConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import divided, read_activation, read_decoder
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.opt import LAYERS, OFFSET

NORM = NormConfig("layernorm", bias=True)


def read_layers(
    keys: Keys, *, first: bool, k_bias: bool | None = None
) -> tuple[list[LayerConfig], list[LayerConfig]]:
    """The encoder's and the decoder's layers.

    Args:
        keys: Keys of config.json.
        first: Whether norms stand before attention and network, or after what they are added to.
        k_bias: Whether keys have a bias; None: as queries and values have.
    """
    dropout = keys.number("hidden_dropout_prob")

    def layer(heads: str, width: str, *, crossed: bool) -> LayerConfig:
        count = keys.whole(heads)
        attention = AttentionConfig(
            count,
            count,
            divided(keys, keys.size("hidden_size"), count),
            qkv_bias=True,
            out_bias=True,
            k_bias=k_bias,
            dropout=keys.number("attention_dropout"),
        )
        network = FeedForwardConfig(
            keys.whole(width),
            read_activation(keys),
            gated=False,
            bias=True,
            dropout=keys.number("activation_dropout"),
        )
        return LayerConfig(
            attention,
            network,
            NORM,
            norm_placement="pre" if first else "post",
            cross_attention=attention if crossed else None,
            dropout=dropout,
        )

    encoder = layer("num_attention_heads", "encoder_ffn_dim", crossed=False)
    decoder = layer("decoder_attention_heads", "decoder_ffn_dim", crossed=True)
    depth = keys.num_layers("num_hidden_layers")
    return [encoder] * depth, [decoder] * keys.num_layers("decoder_layers")


def read(
    keys: Keys,
    embedding: EmbeddingConfig,
    *,
    first: bool,
    head_bias: bool = True,
    small: bool = False,
) -> TransformerConfig:
    """One of the related families.

    Args:
        keys: Keys of config.json.
        embedding: Of both stacks, without scale and dropout.
        first: Whether norms stand first.
        head_bias: Whether a bias is added to the logits.
        small: Whether the decoder normalizes tokens before positions are added, and never scales
            them.
    """
    encoder, decoder = read_layers(keys, first=first)
    scale = math.sqrt(keys.size("hidden_size")) if keys.flag("scale_embedding") else 1.0
    embedding = replace(embedding, scale=scale, dropout=keys.number("hidden_dropout_prob"))
    return read_decoder(
        keys,
        decoder,
        kind="encoder-decoder",
        max_positions=keys.whole("max_position_embeddings"),
        norm=NORM if first else None,
        embedding=replace(embedding, norm_of="tokens", scale=1.0) if small else embedding,
        head_bias=head_bias,
        encoder_layers=tuple(encoder),
        # Without tied weights, each stack has its own token table in transformers.
        encoder=EncoderConfig(embedding, own_tokens=not keys.flag("tie_word_embeddings")),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [config.encoder_layers[0], config.layers[0]]
    embedding: Any = config.encoder.embedding
    (attention, network), (own, other) = ((each.attention, each.feed_forward) for each in layers)
    return {
        "encoder_layers": len(config.encoder_layers),
        "decoder_layers": len(config.layers),
        "encoder_attention_heads": attention.num_heads,
        "decoder_attention_heads": own.num_heads,
        "encoder_ffn_dim": network.hidden_dim,
        "decoder_ffn_dim": other.hidden_dim,
        "activation_dropout": network.dropout,
        "scale_embedding": embedding.scale != 1.0,
    }


def stacks() -> tuple[Rule, ...]:
    """Rules of both stacks, under ``encoder.`` and ``decoder.``."""
    rules: list[Rule] = []
    for side, ours in (("encoder", "encoder_"), ("decoder", "")):
        rules += [
            Rule(f"{side}.embed_positions", f"{ours}embedding.positions"),
            Rule(f"{side}.layernorm_embedding", f"{ours}embedding.norm"),
            Rule(f"{side}.layer_norm", f"{ours}final_norm"),
            *(Rule(f"{side}.{rule.theirs}", ours + rule.ours[0]) for rule in LAYERS),
        ]
    cross = under(
        "decoder.layers.{i}.encoder_attn.",
        "layers.{i}.cross_attention.",
        {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"},
    )
    norm = Rule("decoder.layers.{i}.encoder_attn_layer_norm", "layers.{i}.cross_attention_norm")
    return (*rules, *cross, norm)


SHARED = under(
    "",
    "",
    dict.fromkeys(("shared", "encoder.embed_tokens", "decoder.embed_tokens"), "embedding.tokens"),
)
APART = under(
    "",
    "",
    {
        "encoder.embed_tokens": "encoder_embedding.tokens",
        "decoder.embed_tokens": "embedding.tokens",
    },
)
OUTSIDE = (Rule("lm_head", "head"), Rule("final_logits_bias", "head.bias", Shaped((0,))))
SINUSOIDS = {r"(encoder|decoder)\.embed_positions\.weights?": "the sinusoids"}


def table(values: Mapping[str, Any], *, dropped: Mapping[str, str]) -> Tensors:
    """The table where both stacks share their tokens, or have tokens of their own."""
    if values.get("tie_word_embeddings", True):
        return Tensors((*SHARED, *stacks()), outside=OUTSIDE, dropped=dropped)
    unused = {r"shared\.weight": "the stacks have tokens of their own", **dropped}
    return Tensors((*APART, *stacks()), outside=OUTSIDE, dropped=unused)


DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "hidden_act": "activation_function",
    "hidden_dropout_prob": "dropout",
}
NOT_SUPPORTED = dict.fromkeys(
    ("is_decoder", "add_cross_attention"), "only encoder and decoder together are built"
)
# transformers' classes ignore these keys; the first releases wrote them.
HARMLESS = frozenset(
    (
        "encoder_layerdrop",
        "decoder_layerdrop",
        "init_std",
        "classif_dropout",
        "add_bias_logits",
        "add_final_layer_norm",
        "normalize_before",
        "normalize_embedding",
        "static_position_embeddings",
        "extra_pos_embeddings",
        "extra_layer_norm",
        "layernorm_variant",
        "do_blenderbot_90_layernorm",
        "force_bos_token_to_be_generated",
        "output_past",
        "save_step",
        "unk_token_id",
    )
)


def sister(
    model_type: str,
    class_name: str,
    read: Callable[[Keys], TransformerConfig],
    *,
    sinusoids: bool = False,
    defaults: Mapping[str, Any] = {},  # read only
    **options: Any,
) -> Family:
    """A family with BART's names.

    Args:
        model_type: As config.json says it.
        class_name: transformers' classes begin with it.
        read: Reads the configuration of the family.
        sinusoids: Whether positions are not parameters.
        defaults: Where absent keys mean something else than BART's.
        **options: Further fields of ``Family``.
    """
    dropped = SINUSOIDS if sinusoids else {}
    given: dict[str, Any] = {
        "aliases": ALIASES,
        "not_supported": NOT_SUPPORTED,
        "harmless": HARMLESS,
        "tensors": lambda values: table(values, dropped=dropped),
        "write": write,
        "with_head": "ForConditionalGeneration",
        "initial_key": "init_std",
        **options,
    }
    return Family(
        model_type,
        class_name,
        read,
        defaults={**DEFAULTS, **defaults},
        **given,
    )


_LEARNED = EmbeddingConfig("learned", position_offset=OFFSET, norm=NORM)
MARIANS = EmbeddingConfig("sinusoidal", sinusoid=SinusoidConfig("halves"))

FAMILIES = (
    sister("bart", "Bart", lambda keys: read(keys, _LEARNED, first=False)),
    sister(
        "plbart",
        "PLBart",
        lambda keys: read(keys, _LEARNED, first=False),
        defaults={"attention_dropout": 0.1, "scale_embedding": True},
    ),
    sister(
        "mvp",
        "Mvp",
        lambda keys: read(keys, _LEARNED, first=False),
        not_supported={**NOT_SUPPORTED, "use_prompt": "keys and values of a prompt are not added"},
        harmless=HARMLESS | {"prompt_length", "prompt_mid_dim"},
    ),
    sister("mbart", "MBart", lambda keys: read(keys, _LEARNED, first=True)),
    sister(
        "blenderbot",
        "Blenderbot",
        lambda keys: read(keys, EmbeddingConfig("learned"), first=True),
        defaults={"pad_token_id": 0, "bos_token_id": 1},
    ),
    sister(
        "blenderbot-small",
        "BlenderbotSmall",
        lambda keys: read(keys, replace(_LEARNED, position_offset=0), first=False, small=True),
        defaults={"pad_token_id": 0, "bos_token_id": 1},
    ),
    sister(
        "pegasus",
        "Pegasus",
        lambda keys: read(keys, MARIANS, first=True),
        sinusoids=True,
        defaults={"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
    ),
)
