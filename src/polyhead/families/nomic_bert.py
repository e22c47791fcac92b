"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions and a gated network, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingConfig, HeadTransformConfig, LayerConfig, TransformerConfig
from polyhead.families.bert import (
    EMBEDDINGS,
    POOLER,
    POOLER_RULE,
    POSITIONS,
    read_encoder,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_activation,
    read_layer_norm,
    read_network,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tasks import (
    ANSWERS,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors, under

_THETA = 1000.0


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=_THETA)
    dropout = keys.number("hidden_dropout_prob")
    layer = LayerConfig(
        sizes.attention(rope=rope, dropout=keys.number("attention_probs_dropout_prob")),
        read_network(keys),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        embedding=EmbeddingConfig(
            num_segments=keys.whole("type_vocab_size"), norm=norm, dropout=dropout
        ),
        **read_head(
            keys,
            HeadTransformConfig(None, read_activation(keys), norm=norm),
            pooled=(POOLER,),
            without=(PRE_TRAINING, ANSWERS),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return write_head(config, "NomicBert")


_Q, _K, _V = (f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
RULES = (
    *(rule for rule in EMBEDDINGS if "position" not in rule.theirs and "Norm" not in rule.theirs),
    Rule("emb_ln", "embedding.norm"),
    Rule("encoder.layers.{i}.attn.Wqkv", (_Q, _K, _V), QKVRows()),
    *under(
        "encoder.layers.{i}.",
        "layers.{i}.",
        {
            "attn.out_proj": "attention.o_proj",
            "norm1": "attention_norm",
            "mlp.fc11": "feed_forward.up_proj",
            "mlp.fc12": "feed_forward.gate_proj",
            "mlp.fc2": "feed_forward.down_proj",
            "norm2": "feed_forward_norm",
        },
    ),
)


HEADS = Heads(
    "cls.predictions.decoder",
    "cls.predictions.bias",
    (
        Rule("cls.predictions.transform.dense", "head.transforms.0.dense"),
        Rule("cls.predictions.transform.layer_norm", "head.transforms.0.norm"),
    ),
    pooled=POOLER_RULE,
    others=r"cls\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, RULES, "nomic_bert.")


FAMILIES = (
    Family(
        "nomic_bert",
        "NomicBert",
        read,
        table,
        defaults={
            "head_dim": None,
            "hidden_act": "silu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": True,
        },
        write=write,
        with_head=MASKED,
        gguf=Gguf("nomic-bert", causal=False),
    ),
)
