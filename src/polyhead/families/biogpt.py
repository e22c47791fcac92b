"""BioGPT (Luo et al. 2022)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from polyhead.config import EmbeddingConfig, LayerConfig, NormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_mha_sizes, read_network
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.opt import LAYERS, OFFSET

AROUND_LAYERS = (
    Rule("embed_tokens", "embedding.tokens"),
    Rule("embed_positions", "embedding.positions"),
    Rule("layer_norm", "final_norm"),
)


def read_fairseq(
    keys: Keys, embedding: EmbeddingConfig, attention_dropout: str
) -> TransformerConfig:
    """A decoder as fairseq builds it: norms first with the default epsilon, biases everywhere."""
    sizes, norm = read_mha_sizes(keys), NormConfig("layernorm", bias=True)
    dropout = keys.number("hidden_dropout_prob")
    network = read_network(keys, gated=False, bias=True)
    layer = LayerConfig(
        sizes.attention(qkv_bias=True, out_bias=True, dropout=keys.number(attention_dropout)),
        replace(network, dropout=keys.number("activation_dropout")),
        norm,
        dropout=dropout,
    )
    scaled = keys.flag("scale_embedding")
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=sizes.max_positions,
        norm=norm,
        embedding=replace(
            embedding,
            position_offset=OFFSET,
            scale=math.sqrt(sizes.embed_dim) if scaled else 1.0,
            dropout=dropout,
        ),
    )


def read(keys: Keys) -> TransformerConfig:
    return read_fairseq(keys, EmbeddingConfig(positions="learned"), "attention_probs_dropout_prob")


def write(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    return {
        "scale_embedding": config.embedding.scale != 1.0,
        "activation_dropout": network.dropout,
    }


FAMILIES = (
    Family(
        "biogpt",
        "BioGpt",
        read,
        Tensors(
            (*AROUND_LAYERS, *LAYERS),
            prefix="biogpt.",
            outside=(Rule("output_projection", "head"),),
        ),
        defaults={
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "activation_dropout": 0.0,
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        write=write,
        # The class gives its norms no epsilon but the default.
        harmless=frozenset(("layer_norm_eps", "layerdrop")),
    ),
)
