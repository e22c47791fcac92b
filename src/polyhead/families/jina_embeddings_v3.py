"""Jina Embeddings v3 (Sturua et al. 2024): XLM-RoBERTa with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingConfig, HeadTransformConfig, TransformerConfig
from polyhead.families import nomic_bert, roberta
from polyhead.families.bert import DEFAULTS, POOLER, read_encoder, read_layers
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tasks import MASKED, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under

_THETA = 20_000.0


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=_THETA)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm, rope=rope),
        max_positions=reach(rope, sizes.max_positions),
        embedding=EmbeddingConfig(
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=keys.number("hidden_dropout_prob"),
        ),
        **read_head(keys, HeadTransformConfig(None, "gelu", norm=norm), pooled=(POOLER,)),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return write_head(config, "JinaEmbeddingsV3")


_Q, _K, _V = (f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
RULES = (
    *(
        rule
        for rule in nomic_bert.RULES
        if ".attn." not in rule.theirs and ".mlp." not in rule.theirs
    ),
    Rule("encoder.layers.{i}.mixer.Wqkv", (_Q, _K, _V), QKVRows()),
    *under(
        "encoder.layers.{i}.",
        "layers.{i}.",
        {
            "mixer.out_proj": "attention.o_proj",
            "mlp.fc1": "feed_forward.up_proj",
            "mlp.fc2": "feed_forward.down_proj",
        },
    ),
)


def table(values: Mapping[str, Any]) -> Tensors:
    return roberta.HEADS.table(values, RULES, "roberta.")


FAMILIES = (
    Family(
        "jina_embeddings_v3",
        "JinaEmbeddingsV3",
        read,
        table,
        defaults={
            **DEFAULTS,
            "layer_norm_eps": 1e-5,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        write=write,
        with_head=MASKED,
        gguf=Gguf("jina-bert-v3", causal=False),
        not_supported={"lora_adaptations": "weights of a task (LoRA) are not added"},
    ),
)
