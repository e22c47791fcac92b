"""DistilBERT (Sanh et al. 2019): BERT without segments and pooler, under names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families.bert import EMBEDDINGS, POSITIONS, read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_mha_sizes
from polyhead.families.common.tasks import (
    CLASSIFIER,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

_NORM = NormConfig("layernorm", eps=1e-12, bias=True)


def read(keys: Keys) -> TransformerConfig:
    sizes, activation = read_mha_sizes(keys), read_activation(keys, "activation")
    dropout = keys.number("dropout")
    layer = LayerConfig(
        sizes.attention(qkv_bias=True, out_bias=True, dropout=keys.number("attention_dropout")),
        FeedForwardConfig(
            keys.whole("intermediate_size"), activation, gated=False, bias=True, dropout=dropout
        ),
        _NORM,
        norm_placement="post",
    )
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(positions="learned", norm=_NORM, dropout=dropout),
        **read_head(
            keys,
            HeadTransformConfig(None, activation, norm=_NORM),
            pooled=(HeadTransformConfig(activation="relu"),),
            without=(PRE_TRAINING,),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    return {
        "activation": write_activation(network.activation),
        "dropout": config.embedding.dropout,
        **write_head(config, "DistilBert"),
    }


RULES = (
    *EMBEDDINGS,
    *under(
        "transformer.layer.{i}.",
        "layers.{i}.",
        {
            "attention.q_lin": "attention.q_proj",
            "attention.k_lin": "attention.k_proj",
            "attention.v_lin": "attention.v_proj",
            "attention.out_lin": "attention.o_proj",
            "sa_layer_norm": "attention_norm",
            "ffn.lin1": "feed_forward.up_proj",
            "ffn.lin2": "feed_forward.down_proj",
            "output_layer_norm": "feed_forward_norm",
        },
    ),
)


HEADS = Heads(
    "vocab_projector",
    masked=(
        Rule("vocab_transform", "head.transforms.0.dense"),
        Rule("vocab_layer_norm", "head.transforms.0.norm"),
    ),
    texts=(CLASSIFIER, Rule("pre_classifier", "task.transforms.0.dense")),
    others=r"vocab_.+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, RULES, "distilbert.")


FAMILIES = (
    Family(
        "distilbert",
        "DistilBert",
        read,
        table,
        defaults={
            "activation": "gelu",
            "dropout": 0.1,
            "attention_dropout": 0.1,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
        },
        write=write,
        with_head=MASKED,
        # Initial positions of a new model; dropouts of heads.
        harmless=frozenset(("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout")),
    ),
)
