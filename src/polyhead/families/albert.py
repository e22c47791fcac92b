"""ALBERT (Lan et al. 2020): groups of layers share their weights; the embedding is narrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingProjectionConfig,
    HeadTransformConfig,
    TransformerConfig,
)
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    POOLER,
    POSITIONS,
    read_embedding,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import MASKED, Heads, read_head, write_head
from polyhead.families.common.tensors import Rule, Tensors, under

# Written by transformers of 2019 and 2020, without effect.
_OLD = (
    "down_scale_factor",
    "gap_size",
    "net_structure_type",
    "num_memory_blocks",
    "output_past",
    "eos_token_ids",
)
_MOST = 10_000


def owners(num_layers: int, groups: int, inner: int) -> tuple[int, ...]:
    """For each of ``num_layers * inner`` layers the first that has its weights."""
    first: dict[tuple[int, int], int] = {}
    numbers: list[int] = []
    for i in range(num_layers):
        for j in range(inner):
            # In floating point, as in transformers.
            group = int(i / (num_layers / groups))
            numbers.append(first.setdefault((group, j), len(numbers)))
    return tuple(numbers)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    groups, inner = keys.whole("num_hidden_groups"), keys.whole("inner_group_num")
    if not 1 <= groups <= sizes.num_layers:
        wanted = f"1 to num_hidden_layers={sizes.num_layers}"
        raise keys.refused("num_hidden_groups", groups, wanted)
    if not 1 <= inner <= _MOST // sizes.num_layers:
        raise keys.refused("inner_group_num", inner, f"1 to {_MOST // sizes.num_layers}")
    size = keys.whole("embedding_size")
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm) * inner,
        weights_of=owners(sizes.num_layers, groups, inner),
        max_positions=sizes.max_positions,
        embedding=read_embedding(keys, norm, projection=EmbeddingProjectionConfig(size)),
        **read_head(
            keys, HeadTransformConfig(size, read_activation(keys), norm=norm), pooled=(POOLER,)
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    """Layers that repeat in a group are written as the shortest that says the same."""
    projection, numbers = config.embedding.projection, config.weights_of
    if projection is None or not numbers:
        raise AttributeError("ALBERT projects its embedding, and its layers share weights")
    count = len(numbers)
    inner, groups = next(
        (inner, groups)
        for inner in range(1, count + 1)
        if count % inner == 0
        for groups in range(1, count // inner + 1)
        if owners(count // inner, groups, inner) == numbers
    )
    return {
        "position_embedding_type": "absolute",
        "embedding_size": projection.dim,
        "num_hidden_layers": count // inner,
        "num_hidden_groups": groups,
        "inner_group_num": inner,
        **write_head(config, "Albert"),
    }


_LAYER = {
    "attention.query": "attention.q_proj",
    "attention.key": "attention.k_proj",
    "attention.value": "attention.v_proj",
    "attention.dense": "attention.o_proj",
    "attention.LayerNorm": "attention_norm",
    "ffn": "feed_forward.up_proj",
    "ffn_output": "feed_forward.down_proj",
    "full_layer_layer_norm": "feed_forward_norm",
}


def _layers(values: Mapping[str, Any]) -> list[Rule]:
    """A group's weights are the first layer's that has them."""
    num_layers: int = values["num_hidden_layers"]
    groups, inner = values.get("num_hidden_groups", 1), values.get("inner_group_num", 1)
    if num_layers * inner > _MOST:  # refused by ``read``, but not every file has been read
        raise ValueError(f"at most {_MOST} layers: got {num_layers} * {inner}")
    rules: list[Rule] = []
    for number, owner in enumerate(dict.fromkeys(owners(num_layers, groups, inner))):
        group, j = divmod(number, inner)
        theirs = f"encoder.albert_layer_groups.{group}.albert_layers.{j}."
        rules += under(theirs, f"layers.{owner}.", _LAYER)
    return rules


HEADS = Heads(
    "predictions.decoder",
    "predictions.bias",
    (
        Rule("predictions.dense", "head.transforms.0.dense"),
        Rule("predictions.LayerNorm", "head.transforms.0.norm"),
    ),
    pooled=Rule("pooler", "task.transforms.0.dense"),
    beside={r"sop_classifier\..+": "says in which order two texts were, beside the logits"},
    others=r"(predictions|sop_classifier)\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    project = Rule("encoder.embedding_hidden_mapping_in", "embedding.projection")
    return HEADS.table(values, (*EMBEDDINGS, project, *_layers(values)), "albert.")


FAMILIES = (
    Family(
        "albert",
        "Albert",
        read,
        table,
        defaults={
            **DEFAULTS,
            "embedding_size": 128,
            "num_hidden_groups": 1,
            "inner_group_num": 1,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        write=write,
        with_head=MASKED,
        not_supported={"is_decoder": "only the encoder is built"},
        harmless=frozenset(("classifier_dropout_prob", *_OLD)),
    ),
)
