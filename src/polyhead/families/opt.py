"""OPT (Zhang et al. 2022): learned positions from the third row on; OPT-350m has its norms last and
an embedding of another size.
"""

from __future__ import annotations

from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_mha_sizes, read_network
from polyhead.families.common.tensors import Tensors, under

LAYERS = under(
    "layers.{i}.",
    "layers.{i}.",
    {
        "self_attn.q_proj": "attention.q_proj",
        "self_attn.k_proj": "attention.k_proj",
        "self_attn.v_proj": "attention.v_proj",
        "self_attn.out_proj": "attention.o_proj",
        "self_attn_layer_norm": "attention_norm",
        "fc1": "feed_forward.up_proj",
        "fc2": "feed_forward.down_proj",
        "final_layer_norm": "feed_forward_norm",
    },
)
"""Fairseq's names."""

OFFSET = 2
"""Fairseq keeps the first rows of a table of positions for padding."""


def read(keys: Keys) -> TransformerConfig:
    sizes = read_mha_sizes(keys)
    biased, affine = keys.flag("enable_bias"), keys.flag("layer_norm_elementwise_affine")
    norm = NormConfig("layernorm", bias=affine, weight=affine)
    first, removed = keys.flag("do_layer_norm_before"), keys.flag("_remove_final_layer_norm")
    layer = LayerConfig(
        sizes.attention(qkv_bias=biased, out_bias=biased, dropout=keys.number("attention_dropout")),
        read_network(keys, gated=False, bias=biased),
        norm,
        norm_placement="pre" if first else "post",
        dropout=keys.number("hidden_dropout_prob"),
    )
    tokens = keys.whole("word_embed_proj_dim", sizes.embed_dim)
    other = tokens != sizes.embed_dim
    config = read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=sizes.max_positions,
        norm=norm if first and not removed else None,
        embedding=EmbeddingConfig(
            positions="learned",
            position_offset=OFFSET,
            projection=EmbeddingProjectionConfig(tokens, "tokens", bias=False) if other else None,
        ),
        head_transforms=(HeadTransformConfig(tokens, bias=False),) if other else (),
    )
    if other and config.head is None:
        wanted = f"{sizes.embed_dim} in a bare body, whose states it would project"
        raise keys.refused("word_embed_proj_dim", tokens, wanted)
    return config


def write(config: TransformerConfig) -> dict[str, Any]:
    layer, projection = config.layers[0], config.embedding.projection
    attention: Any = layer.attention
    first = layer.norm_placement == "pre"
    return {
        "enable_bias": attention.qkv_bias,
        "layer_norm_elementwise_affine": layer.norm.weight,
        "do_layer_norm_before": first,
        "_remove_final_layer_norm": first and config.final_norm is None,
        "word_embed_proj_dim": config.embed_dim if projection is None else projection.dim,
    }


FAMILIES = (
    Family(
        "opt",
        "OPT",
        read,
        Tensors(
            (
                *under(
                    "decoder.",
                    "",
                    {
                        "embed_tokens": "embedding.tokens",
                        "embed_positions": "embedding.positions",
                        "project_in": "embedding.projection",
                        "project_out": "head.transforms.0.dense",
                        "final_layer_norm": "final_norm",
                        **{rule.theirs: rule.ours[0] for rule in LAYERS},
                    },
                ),
            ),
        ),
        initial_key="init_std",
        defaults={
            "hidden_act": "relu",
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.1,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "word_embed_proj_dim": None,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        write=write,
        aliases={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "hidden_dropout_prob": "dropout",
        },
        harmless=frozenset(("activation_dropout", "layerdrop", "init_std")),
    ),
)
