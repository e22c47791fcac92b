"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from typing import Any

from polyhead.config import EmbeddingConfig, LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_layer_norm,
    read_network,
    read_sizes,
    read_token_ids,
)
from polyhead.families.common.tensors import Tensors, under


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_layer_norm(keys)
    dropout = keys.number("hidden_dropout_prob")
    keys.expect("position_embedding_type", "absolute")
    keys.flag("tie_word_embeddings", True)  # of the masked-token head, which is not built
    names = keys.take("architectures", None) or ["BertModel"]
    if not str(names[0]).endswith(("Model", "ForMaskedLM", "ForPreTraining")):
        wanted = "a class named ...Model or ...ForMaskedLM or ...ForPreTraining"
        raise keys.refused("architectures", names, wanted)
    layer = LayerConfig(
        sizes.attention(
            qkv_bias=True, out_bias=True, dropout=keys.number("attention_probs_dropout_prob")
        ),
        read_network(keys, gated=False, bias=True),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return TransformerConfig(
        kind="encoder",
        vocab_size=keys.whole("vocab_size"),
        embed_dim=sizes.embed_dim,
        max_positions=sizes.max_positions,
        layers=(layer,) * sizes.num_layers,
        embedding=EmbeddingConfig(
            positions="learned",
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=dropout,
        ),
        final_norm=None,
        head=None,
        **read_token_ids(keys),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {"position_embedding_type": "absolute"}


LAYERS = under(
    "encoder.layer.{i}.",
    "layers.{i}.",
    {
        "attention.self.query": "attention.q_proj",
        "attention.self.key": "attention.k_proj",
        "attention.self.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "feed_forward.up_proj",
        "output.dense": "feed_forward.down_proj",
        "output.LayerNorm": "feed_forward_norm",
    },
)
EMBEDDINGS = under(
    "embeddings.",
    "embedding.",
    {
        "word_embeddings": "tokens",
        "position_embeddings": "positions",
        "token_type_embeddings": "segments",
        "LayerNorm": "norm",
    },
)

FAMILIES = (
    Family(
        "bert",
        "Bert",
        read,
        Tensors(
            (*EMBEDDINGS, *LAYERS),
            prefix="bert.",
            outside=(),
            leaves={"gamma": "weight", "beta": "bias"},
            dropped={
                r"embeddings\.position_ids": "0, 1, 2, ...",
                r"pooler\.dense\.(weight|bias)": "comes after the hidden states",
                r"cls\..+": "the pre-training heads come after the hidden states",
            },
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "type_vocab_size": 2,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        write=write,
        not_supported={
            "is_decoder": "only the encoder is built",
            "add_cross_attention": "only the encoder is built",
        },
    ),
)
