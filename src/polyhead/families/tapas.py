"""TAPAS (Herzig et al. 2020): BERT whose tokens also have a row, a column and ranks in a table.

Calls take no tables: a text is one cell of kind 0, as in transformers where no token types are
given. Answers are cells, so the class that chooses them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingConfig, FirstRowConfig, HeadTransformConfig, TransformerConfig
from polyhead.families import bert
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation, read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import ANSWERS, MASKED, TOKENS, read_head
from polyhead.families.common.tensors import Rule, Tensors

_OF_ANSWERS = (
    "positive_label_weight num_aggregation_labels aggregation_loss_weight answer_loss_importance "
    "use_answer_as_supervision use_normalized_answer_loss huber_loss_delta temperature "
    "aggregation_temperature use_gumbel_for_cells use_gumbel_for_aggregation answer_loss_cutoff "
    "average_approximation_function cell_selection_preference max_num_rows max_num_columns "
    "average_logits_per_cell select_one_column allow_empty_column_selection disable_per_token_loss "
    "init_cell_selection_weights_to_zero aggregation_labels no_aggregation_label_index"
)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    # Positions begin anew in each cell, of which a text has one.
    keys.expect("reset_position_index_per_cell", True)
    tables = keys.wholes("type_vocab_sizes")
    if not tables or min(tables) < 1:
        raise keys.refused("type_vocab_sizes", tables, "whole numbers from 1")
    embedding = EmbeddingConfig(
        positions="learned",
        first_rows=tuple(FirstRowConfig(rows) for rows in tables),
        norm=norm,
        dropout=keys.number("hidden_dropout_prob"),
    )
    masked = HeadTransformConfig(None, read_activation(keys), norm=norm)
    return bert.read_encoder(
        keys,
        bert.read_layers(keys, sizes, norm),
        max_positions=sizes.max_positions,
        embedding=embedding,
        **read_head(keys, masked, pooled=(bert.POOLER,), without=(ANSWERS, TOKENS)),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    tables = [each.rows for each in config.embedding.first_rows]
    written = bert.write("Tapas", config)
    del written["position_embedding_type"]
    return {**written, "type_vocab_sizes": tables, "reset_position_index_per_cell": True}


def table(values: Mapping[str, Any]) -> Tensors:
    count = len(values.get("type_vocab_sizes", _TABLES))
    rules = tuple(
        Rule(f"embeddings.token_type_embeddings_{i}", f"embedding.first_rows.{i}")
        for i in range(count)
    )
    return bert.table((*bert.LAYERS, *rules), "tapas.", values)


_TABLES = (3, 256, 256, 2, 256, 256, 10)

FAMILIES = (
    Family(
        "tapas",
        "Tapas",
        read,
        table,
        defaults={
            **bert.WITHOUT_TYPES,
            "max_position_embeddings": 1024,
            "type_vocab_sizes": _TABLES,
            "reset_position_index_per_cell": True,
        },
        write=write,
        with_head=MASKED,
        not_supported=bert.ONLY_ENCODER,
        harmless=frozenset(_OF_ANSWERS.split()),
    ),
)
