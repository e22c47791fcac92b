"""BertGeneration (Rothe et al. 2019): BERT without token types, as a decoder or as an encoder.

``BertGenerationDecoder`` has logits, ``BertGenerationEncoder`` has none; ``is_decoder`` says of
either whether it is causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import EmbeddingConfig, TransformerConfig
from polyhead.families.bert import (
    EMBEDDINGS,
    LAYERS,
    POSITIONS,
    WITHOUT_TYPES,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import BARE, MASKED, Heads
from polyhead.families.common.tensors import Tensors

_ENCODER, _DECODER = "BertGenerationEncoder", "BertGenerationDecoder"


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    keys.expect("position_embedding_type", "absolute")
    names = keys.take("architectures", None) or [_ENCODER]
    if names not in ([_ENCODER], [_DECODER]):
        raise keys.refused("architectures", names, f"{_ENCODER} or {_DECODER}")
    tied, has_head = keys.flag("tie_word_embeddings"), names == [_DECODER]
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm),
        kind="decoder" if keys.flag("is_decoder") else "encoder",
        max_positions=sizes.max_positions,
        embedding=EmbeddingConfig(
            positions="learned", norm=norm, dropout=keys.number("hidden_dropout_prob")
        ),
        head=None if not has_head else "tied" if tied else "untied",
        head_bias=has_head,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    return {
        "position_embedding_type": "absolute",
        "is_decoder": config.kind == "decoder",
        "tie_word_embeddings": config.head != "untied",
    }


HEADS = Heads(
    "lm_head.decoder",
    "lm_head.bias",
    others=r"lm_head\..+",
    dropped=POSITIONS,
)


def table(values: Mapping[str, Any]) -> Tensors:
    kind = MASKED if values.get("architectures") == [_DECODER] else BARE
    return HEADS.table({**values, "architectures": [kind]}, (*EMBEDDINGS, *LAYERS), "bert.")


FAMILIES = (
    Family(
        "bert-generation",
        "BertGeneration",
        read,
        table,
        defaults={**WITHOUT_TYPES, "bos_token_id": 2, "eos_token_id": 1, "is_decoder": False},
        write=write,
        with_head="Decoder",
        bare="Encoder",
        not_supported={"add_cross_attention": "an encoder beside it is not built"},
    ),
)
