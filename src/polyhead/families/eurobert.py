"""EuroBERT (Boizard et al. 2025): Llama's layers that see both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingConfig, HeadTransformConfig, LayerConfig, TransformerConfig
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tasks import (
    ANSWERS,
    CLASSIFIER,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    biased, of_network = keys.flag("attention_bias"), keys.flag("mlp_bias")
    attention = sizes.attention(
        rope=rope, qkv_bias=biased, out_bias=biased, dropout=keys.number("attention_dropout")
    )
    pooling = keys.choice("classifier_pooling", {"bos": "first", "mean": "mean", "late": "late"})
    layer = LayerConfig(attention, read_network(keys, bias=of_network), norm)
    return read_encoder(
        keys,
        (layer,) * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        embedding=EmbeddingConfig(),
        final_norm=norm,
        **read_head(
            keys,
            head_bias=of_network,
            pooled=(HeadTransformConfig(activation="gelu"),),
            pooling="first" if pooling == "first" else "mean",
            late=pooling == "late",
            without=(PRE_TRAINING, ANSWERS),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    task = config.task
    early = task is not None and task.pooling is not None and not task.late
    pooling = {"first": "bos"}.get(str(task and task.pooling), "mean") if early else "late"
    return {"classifier_pooling": pooling, **write_head(config, "EuroBert")}


HEADS = Heads(
    "lm_head",
    texts=(CLASSIFIER, Rule("dense", "task.transforms.0.dense")),
    others=r"lm_head\..+",
    dropped=DECODER.dropped,
)


def table(values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, DECODER.rules, "model.")


FAMILIES = (
    Family(
        "eurobert",
        "EuroBert",
        read,
        table,
        defaults={
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "classifier_pooling": "late",
            "pad_token_id": 128_001,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            "tie_word_embeddings": False,
        },
        write=write,
        with_head=MASKED,
        gguf=Gguf("eurobert", causal=False),
        # Llama-Embed-Nemotron: Llama without a causal mask, of which transformers has no class.
        more_gguf=(Gguf("llama-embed", steps=PAIRS, causal=False, saved=False),),
    ),
)
