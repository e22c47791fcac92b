"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    HeadTransformConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    Sizes,
    read_activation,
    read_layer_norm,
    read_mha_sizes,
    read_network,
    read_token_ids,
)
from polyhead.families.common.tasks import MASKED, Heads, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under

POOLER = HeadTransformConfig(activation="tanh")
POOLER_RULE = Rule("pooler.dense", "task.transforms.0.dense")
POSITIONS = {r"embeddings\.position_ids": "0, 1, 2, ..."}


def read_layers(
    keys: Keys, sizes: Sizes, norm: NormConfig, **attention: Any
) -> tuple[LayerConfig, ...]:
    """BERT's layers."""
    heads = {"qkv_bias": True, "out_bias": True} | attention
    layer = LayerConfig(
        sizes.attention(dropout=keys.number("attention_probs_dropout_prob"), **heads),
        read_network(keys, gated=False, bias=True),
        norm,
        norm_placement="post",
        dropout=keys.number("hidden_dropout_prob"),
    )
    return (layer,) * sizes.num_layers


def read_encoder(
    keys: Keys,
    layers: tuple[LayerConfig, ...],
    *,
    max_positions: int,
    embedding: EmbeddingConfig,
    **options: Any,
) -> TransformerConfig:
    """The encoder around some layers; the other keys are taken from the file."""
    return TransformerConfig(
        kind="encoder",
        vocab_size=keys.whole("vocab_size"),
        embed_dim=keys.size("hidden_size"),
        max_positions=max_positions,
        layers=layers,
        embedding=embedding,
        **{"final_norm": None, **read_token_ids(keys), **options},
    )


def read_embedding(keys: Keys, norm: NormConfig, **options: Any) -> EmbeddingConfig:
    """Learned positions, segments, a norm."""
    keys.expect("position_embedding_type", "absolute")
    return EmbeddingConfig(
        positions="learned",
        num_segments=keys.whole("type_vocab_size"),
        norm=norm,
        dropout=keys.number("hidden_dropout_prob"),
        **options,
    )


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, norm),
        **read_head(
            keys, HeadTransformConfig(None, read_activation(keys), norm=norm), pooled=(POOLER,)
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {"position_embedding_type": "absolute", **write_head(config, "Bert")}


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
PREDICTIONS = under(
    "cls.predictions.transform.", "head.transform.", {"dense": "dense", "LayerNorm": "norm"}
)


HEADS = Heads(
    "cls.predictions.decoder",
    "cls.predictions.bias",
    PREDICTIONS,
    pooled=POOLER_RULE,
    beside={r"cls\.seq_relationship\..+": "says whether two texts follow on, beside the logits"},
    others=r"cls\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    leaves = {"gamma": "weight", "beta": "bias"}
    return HEADS.table(values, (*EMBEDDINGS, *LAYERS), "bert.", leaves=leaves)


DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
ONLY_ENCODER = {
    "is_decoder": "only the encoder is built",
    "add_cross_attention": "only the encoder is built",
}

FAMILIES = (
    Family(
        "bert",
        "Bert",
        read,
        table,
        defaults=DEFAULTS,
        write=write,
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
        # RoBERTa and XLM-RoBERTa come so too: the converter cuts the positions that they never use.
        gguf=Gguf("bert", {"attention.head_count_kv": None}, causal=False),
    ),
)
