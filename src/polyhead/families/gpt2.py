"""GPT-2 (Radford et al. 2019), GPT-SW3 (Ekgren et al. 2022), which transformers loads as GPT-2, and
the first GPT (2018), which has its norms last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    InitialConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.config.feed_forward import Activation
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    Sizes,
    read_activation,
    read_decoder,
    read_layer_norm,
    read_mha_sizes,
)
from polyhead.families.common.steps import QKVRows, Transposed
from polyhead.families.common.tensors import Rule, Tensors

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
    "attention_dropout": "attn_pdrop",
    "hidden_dropout_prob": "resid_pdrop",
}
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "embd_pdrop": 0.1,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "pad_token_id": None,
}
SUMMARY = frozenset(
    (
        "n_ctx",
        "n_special",
        "predict_special_tokens",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    )
)
"""Keys of the head for multiple choice, and of older files."""
NO_CROSS_ATTENTION = {"add_cross_attention": "decoders that read an encoder's states have one here"}

_FIRST_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu_tanh",  # what that code calls gelu is the approximation
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

QKV = tuple(f"layers.{{i}}.attention.{name}_proj" for name in "qkv")


def read_gpt(
    keys: Keys,
    sizes: Sizes,
    attentions: Iterable[AttentionConfig],
    *,
    positions: Literal["learned"] | None = "learned",
    parallel: Literal["one norm"] | None = None,
    placement: Literal["pre", "post"] = "pre",
    **options: Any,
) -> TransformerConfig:
    """What OpenAI's and EleutherAI's GPTs share: norms, an ungated network, biases, dropouts."""
    norm, dropout = read_layer_norm(keys), keys.number("hidden_dropout_prob")
    network = FeedForwardConfig(
        keys.whole("intermediate_size", 4 * sizes.embed_dim),
        activation=options.pop("activation", None) or read_activation(keys),
        gated=False,
        bias=True,
    )
    layers = [
        LayerConfig(
            attention,
            network,
            norm,
            norm_placement=placement,
            parallel=parallel,
            dropout=dropout,
        )
        for attention in attentions
    ]
    return read_decoder(
        keys,
        layers,
        max_positions=sizes.max_positions,
        norm=norm if placement == "pre" else None,
        embedding=EmbeddingConfig(positions=positions, dropout=keys.number("embd_pdrop")),
        **options,
    )


def write_gpt(config: TransformerConfig) -> dict[str, Any]:
    return {"embd_pdrop": config.embedding.dropout}


def read(keys: Keys) -> TransformerConfig:
    sizes = read_mha_sizes(keys)
    scaled, by_layer = (
        keys.flag("scale_attn_weights"),
        keys.flag("scale_attn_by_inverse_layer_idx"),
    )
    scale = 1 / math.sqrt(sizes.head_dim) if scaled else 1.0
    dropout = keys.number("attention_dropout")
    attentions = [
        sizes.attention(
            qkv_bias=True,
            out_bias=True,
            scale=None if scaled and not by_layer else scale / (i + 1 if by_layer else 1),
            dropout=dropout,
        )
        for i in range(sizes.num_layers)
    ]
    return read_gpt(keys, sizes, attentions)


def write(config: TransformerConfig) -> dict[str, Any]:
    scales = [layer.attention.scale for layer in config.layers]
    scaled = scales[0] != 1.0
    return {
        **write_gpt(config),
        "scale_attn_weights": scaled,
        "scale_attn_by_inverse_layer_idx": scales[0] is not None
        and (scaled or scales[-1] != scales[0]),
    }


def read_first(keys: Keys) -> TransformerConfig:
    sizes, dropout = read_mha_sizes(keys), keys.number("attention_dropout")
    return read_gpt(
        keys,
        sizes,
        [sizes.attention(qkv_bias=True, out_bias=True, dropout=dropout)] * sizes.num_layers,
        placement="post",
        activation=keys.choice("hidden_act", _FIRST_ACTIVATIONS),
    )


def write_first(config: TransformerConfig) -> dict[str, Any]:
    ours: Any = config.layers[0].feed_forward
    names = {known: name for name, known in reversed([*_FIRST_ACTIVATIONS.items()])}
    return {**write_gpt(config), "afn": names[ours.activation]}


def gpt_tensors(
    attention: tuple[Rule, ...], tokens: str = "wte", positions: str = "wpe"
) -> Tensors:
    """The table around some rules of attention."""
    return Tensors(
        (
            Rule(tokens, "embedding.tokens"),
            Rule(positions, "embedding.positions"),
            Rule("ln_f", "final_norm"),
            Rule("h.{i}.ln_1", "layers.{i}.attention_norm"),
            Rule("h.{i}.ln_2", "layers.{i}.feed_forward_norm"),
            *attention,
        ),
        prefix="transformer.",
        dropped={
            r"h\.\d+\.attn\.(attention\.)?(bias|masked_bias|causal_mask)": "the causal mask",
            r"h\.\d+\.attn\.embed_positions": "follows from the configuration",
        },
    )


_CONVOLUTIONS = (  # weights lie as [in, out]
    Rule("h.{i}.attn.c_attn", QKV, Transposed(), QKVRows()),
    Rule("h.{i}.attn.c_proj", "layers.{i}.attention.o_proj", Transposed()),
    Rule("h.{i}.mlp.c_fc", "layers.{i}.feed_forward.up_proj", Transposed()),
    Rule("h.{i}.mlp.c_proj", "layers.{i}.feed_forward.down_proj", Transposed()),
)

_GPT2 = Family(
    "gpt2",
    "GPT2",
    read,
    gpt_tensors(_CONVOLUTIONS),
    initial=InitialConfig("residual"),
    defaults=DEFAULTS
    | {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    write=write,
    aliases=ALIASES,
    not_supported=NO_CROSS_ATTENTION,
    harmless=SUMMARY | {"reorder_and_upcast_attn"},
    with_head="LMHeadModel",
    gguf=Gguf(
        "gpt2",
        settings={"attention.head_count_kv": None},
        steps={  # the converter transposes
            "h.{i}.attn.c_attn": (QKVRows(),),
            **dict.fromkeys((rule.theirs for rule in _CONVOLUTIONS[1:]), ()),
        },
    ),
)

FAMILIES = (
    _GPT2,
    replace(_GPT2, model_type="gpt-sw3", gguf=None),
    Family(
        "openai-gpt",
        "OpenAIGPT",
        read_first,
        gpt_tensors(_CONVOLUTIONS, "tokens_embed", "positions_embed"),
        defaults=DEFAULTS
        | {
            "hidden_act": "gelu",
            "bos_token_id": None,
            "eos_token_id": None,
        },
        write=write_first,
        aliases={key: name for key, name in ALIASES.items() if key != "intermediate_size"}
        | {"hidden_act": "afn"},
        harmless=SUMMARY,
        with_head="LMHeadModel",
    ),
)
