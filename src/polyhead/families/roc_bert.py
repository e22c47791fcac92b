"""RoCBert (Su et al. 2022): BERT whose tokens also have a shape and a pronunciation.

Calls take no ids of them: every token has those of number 0, as in transformers where none are
given. Without ``concat_input`` none are added then, and the model is BERT. Training changes those
rows, which transformers keeps as they are where padding has the number 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import EmbeddingProjectionConfig, FirstRowConfig, TransformerConfig
from polyhead.families import bert
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.tasks import MASKED
from polyhead.families.common.tensors import Rule, Tensors

_PARTS = {"shape": "shape_embed", "pronunciation": "pronunciation_embed"}
"""Names of the tables, in the order in which their rows stand behind a token's vector."""


def read(keys: Keys) -> TransformerConfig:
    joined = keys.flag("concat_input")
    tables = []
    for part in _PARTS:
        rows, dim = keys.size(f"{part}_vocab_size"), keys.size(f"{part}_embed_dim")
        tables.append(FirstRowConfig(rows, dim=dim))
        if not keys.flag(f"enable_{part}") and joined:
            raise keys.refused(f"enable_{part}", False, "True with concat_input")
    config = bert.read(keys)
    if not joined:
        return config
    projection = EmbeddingProjectionConfig(config.embed_dim, "tokens")
    embedding = replace(config.embedding, projection=projection, first_rows=tuple(tables))
    return replace(config, embedding=embedding)


def write(config: TransformerConfig) -> dict[str, Any]:
    tables = config.embedding.first_rows
    written = {**bert.write("RoCBert", config), "concat_input": bool(tables)}
    for part, each in zip(_PARTS, tables, strict=False):
        written |= {f"{part}_vocab_size": each.rows, f"{part}_embed_dim": each.dim}
    return written


def table(values: Mapping[str, Any]) -> Tensors:
    if values.get("concat_input", True):
        rules = [
            Rule(f"embeddings.{name}", f"embedding.first_rows.{i}")
            for i, name in enumerate(_PARTS.values())
        ]
        rules.append(Rule("embeddings.map_inputs_layer", "embedding.projection"))
        return bert.table((*bert.LAYERS, *rules), "roc_bert.", values)
    made = bert.table(bert.LAYERS, "roc_bert.", values)
    unread = {rf"embeddings\.{name}\.weight": "read by ids of a call" for name in _PARTS.values()}
    return replace(made, dropped={**made.dropped, **unread})


FAMILIES = (
    Family(
        "roc_bert",
        "RoCBert",
        read,
        table,
        defaults={
            **bert.DEFAULTS,
            "enable_pronunciation": True,
            "enable_shape": True,
            "pronunciation_embed_dim": 768,
            "pronunciation_vocab_size": 910,
            "shape_embed_dim": 512,
            "shape_vocab_size": 24858,
            "concat_input": True,
        },
        write=write,
        with_head=MASKED,
        not_supported=bert.ONLY_ENCODER,
    ),
)
