"""RoBERTa (Liu et al. 2019), its multilingual and French versions, and three relatives.

BERT's layers. Positions count from the padding token's id plus one, and the classes of a text come
from a head of their own in place of the pooler. data2vec's text encoder (Baevski et al. 2022) is
the same model trained in another way. RoBERTa-PreLayerNorm (fairseq) and XLM-RoBERTa-XL (Goyal et
al. 2021) have their norms before attention and network, and one after the last layer; the latter
has none over the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from polyhead.config import HeadTransformConfig, TransformerConfig
from polyhead.families.bert import (
    DEFAULTS,
    EMBEDDINGS,
    LAYERS,
    ONLY_ENCODER,
    POOLER,
    POSITIONS,
    layers,
    read_embedding,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import (
    CLASSIFICATION_HEAD,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors


def read_offset(keys: Keys, rows: int) -> int:
    """The first token's row in a table of positions: that behind the padding token's."""
    offset = keys.whole("pad_token_id") + 1
    if not 0 < offset < rows:
        wanted = f"0 to max_position_embeddings={rows} - 2"
        raise keys.refused("pad_token_id", offset - 1, wanted)
    return offset


def read(keys: Keys, *, pre_norm: bool = False, embedding_norm: bool = True) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    offset = read_offset(keys, sizes.max_positions)
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm, "pre" if pre_norm else "post"),
        max_positions=sizes.max_positions - offset,
        embedding=read_embedding(keys, norm if embedding_norm else None, position_offset=offset),
        final_norm=norm if pre_norm else None,
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=norm),
            pooled=(POOLER,),
            without=(PRE_TRAINING,),
        ),
    )


def write(class_name: str, config: TransformerConfig) -> dict[str, Any]:
    return {
        "position_embedding_type": "absolute",
        "max_position_embeddings": config.max_positions + config.embedding.position_offset,
        **write_head(config, class_name),
    }


HEADS = Heads(
    "lm_head.decoder",
    "lm_head.bias",
    (
        Rule("lm_head.dense", "head.transforms.0.dense"),
        Rule("lm_head.layer_norm", "head.transforms.0.norm"),
    ),
    texts=CLASSIFICATION_HEAD,
    others=r"lm_head\..+",
    dropped=POSITIONS | {r"pooler\.dense\.(weight|bias)": "comes after the hidden states"},
)


def table(rules: tuple[Rule, ...], prefix: str, values: Mapping[str, Any]) -> Tensors:
    return HEADS.table(values, (*EMBEDDINGS, *rules), prefix)


FAIRSEQ = {**DEFAULTS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def _family(
    model_type: str,
    class_name: str,
    prefix: str = "roberta.",
    rules: tuple[Rule, ...] = LAYERS,
    *,
    defaults: Mapping[str, Any] = FAIRSEQ,
    pre_norm: bool = False,
    embedding_norm: bool = True,
) -> Family:
    return Family(
        model_type,
        class_name,
        partial(read, pre_norm=pre_norm, embedding_norm=embedding_norm),
        partial(table, rules, prefix),
        defaults=defaults,
        write=partial(write, class_name),
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
    )


FAMILIES = (
    _family("roberta", "Roberta"),
    _family("xlm-roberta", "XLMRoberta"),
    _family("camembert", "Camembert"),
    _family("data2vec-text", "Data2VecText", "data2vec_text."),
    _family(
        "roberta-prelayernorm",
        "RobertaPreLayerNorm",
        "roberta_prelayernorm.",
        (
            *layers("attention.LayerNorm", "intermediate.LayerNorm"),
            Rule("LayerNorm", "final_norm"),
        ),
        pre_norm=True,
    ),
    _family(
        "xlm-roberta-xl",
        "XLMRobertaXL",
        rules=(
            *layers("attention.self_attn_layer_norm", "LayerNorm"),
            Rule("encoder.LayerNorm", "final_norm"),
        ),
        defaults={**FAIRSEQ, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
        pre_norm=True,
        embedding_norm=False,
    ),
)
