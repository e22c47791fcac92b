"""BERT (Devlin et al. 2019) and two relatives.

ERNIE (Sun et al. 2019) has task types from version 2 on. Megatron-BERT (Shoeybi et al. 2019) has
its norms before attention and network, one after the last layer, and none over the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from polyhead.config import (
    EmbeddingConfig,
    FirstRowConfig,
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
OLD_LEAVES = {"gamma": "weight", "beta": "bias"}
POSITIONS = {r"embeddings\.position_ids": "0, 1, 2, ..."}


def read_layers(
    keys: Keys,
    sizes: Sizes,
    norm: NormConfig,
    placement: Literal["pre", "post"] = "post",
    **attention: Any,
) -> tuple[LayerConfig, ...]:
    """BERT's layers."""
    heads = {"qkv_bias": True, "out_bias": True} | attention
    layer = LayerConfig(
        sizes.attention(dropout=keys.number("attention_probs_dropout_prob"), **heads),
        read_network(keys, gated=False, bias=True),
        norm,
        norm_placement=placement,
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
        vocab_size=keys.whole("vocab_size"),
        embed_dim=keys.size("hidden_size"),
        max_positions=max_positions,
        layers=layers,
        embedding=embedding,
        **{"kind": "encoder", "final_norm": None, **read_token_ids(keys), **options},
    )


def read_embedding(keys: Keys, norm: NormConfig | None, **options: Any) -> EmbeddingConfig:
    """Learned positions, segments, a norm."""
    keys.expect("position_embedding_type", "absolute")
    return EmbeddingConfig(
        positions="learned",
        num_segments=keys.whole("type_vocab_size"),
        norm=norm,
        dropout=keys.number("hidden_dropout_prob"),
        **options,
    )


def read(
    keys: Keys, *, pre_norm: bool = False, first_rows: tuple[FirstRowConfig, ...] = ()
) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm, "pre" if pre_norm else "post"),
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, None if pre_norm else norm, first_rows=first_rows),
        final_norm=norm if pre_norm else None,
        **read_head(
            keys, HeadTransformConfig(None, read_activation(keys), norm=norm), pooled=(POOLER,)
        ),
    )


def read_ernie(keys: Keys) -> TransformerConfig:
    tasks = keys.size("task_type_vocab_size")
    return read(keys, first_rows=(FirstRowConfig(tasks),) if keys.flag("use_task_id") else ())


def write(class_name: str, config: TransformerConfig) -> dict[str, Any]:
    return {"position_embedding_type": "absolute", **write_head(config, class_name)}


def write_ernie(config: TransformerConfig) -> dict[str, Any]:
    tasks = config.embedding.first_rows
    counted = {"task_type_vocab_size": tasks[0].rows} if tasks else {}
    return {**write("Ernie", config), "use_task_id": bool(tasks), **counted}


def layers(attention_norm: str, feed_forward_norm: str) -> tuple[Rule, ...]:
    """Rules of the layers, by what the file calls their norms."""
    return under(
        "encoder.layer.{i}.",
        "layers.{i}.",
        {
            "attention.self.query": "attention.q_proj",
            "attention.self.key": "attention.k_proj",
            "attention.self.value": "attention.v_proj",
            "attention.output.dense": "attention.o_proj",
            attention_norm: "attention_norm",
            "intermediate.dense": "feed_forward.up_proj",
            "output.dense": "feed_forward.down_proj",
            feed_forward_norm: "feed_forward_norm",
        },
    )


LAYERS = layers("attention.output.LayerNorm", "output.LayerNorm")
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
    "cls.predictions.transform.", "head.transforms.0.", {"dense": "dense", "LayerNorm": "norm"}
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


def table(rules: tuple[Rule, ...], prefix: str, values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, (*EMBEDDINGS, *rules), prefix, leaves=OLD_LEAVES)


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
WITHOUT_TYPES = {key: DEFAULTS[key] for key in DEFAULTS if key != "type_vocab_size"}
"""Of relatives without token types."""
ONLY_ENCODER = {
    "is_decoder": "only the encoder is built",
    "add_cross_attention": "only the encoder is built",
}

FAMILIES = (
    Family(
        "bert",
        "Bert",
        read,
        partial(table, LAYERS, "bert."),
        defaults=DEFAULTS,
        write=partial(write, "Bert"),
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
        # RoBERTa and XLM-RoBERTa come so too: the converter cuts the positions that they never use.
        gguf=Gguf("bert", {"attention.head_count_kv": None}, causal=False),
    ),
    Family(
        "ernie",
        "Ernie",
        read_ernie,
        partial(
            table,
            (*LAYERS, Rule("embeddings.task_type_embeddings", "embedding.first_rows.0")),
            "ernie.",
        ),
        defaults={**DEFAULTS, "use_task_id": False, "task_type_vocab_size": 3},
        write=write_ernie,
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
    ),
    Family(
        "megatron-bert",
        "MegatronBert",
        partial(read, pre_norm=True),
        partial(table, (*layers("attention.ln", "ln"), Rule("encoder.ln", "final_norm")), "bert."),
        defaults=DEFAULTS,
        write=partial(write, "MegatronBert"),
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
    ),
)
