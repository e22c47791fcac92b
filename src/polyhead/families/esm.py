"""ESM-1b (Rives et al. 2021) and ESM-2 (Lin et al. 2023): encoders of proteins.

BERT's layers with their norms first, and RoBERTa's head. ESM-1b counts positions as RoBERTa does,
ESM-2 rotates. Masked tokens count as dropped (``TokenDropoutConfig``), and the embedding has a norm
only where ``emb_layer_norm_before`` says so. Large ESM-2 files hold rotary frequencies rounded to
float16, which count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhead.config import (
    EmbeddingConfig,
    HeadTransformConfig,
    RopeConfig,
    TokenDropoutConfig,
    TransformerConfig,
)
from polyhead.families.bert import (
    EMBEDDINGS,
    OLD_LEAVES,
    ONLY_ENCODER,
    POOLER,
    POSITIONS,
    WITHOUT_TYPES,
    layers,
    read_encoder,
    read_layers,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_layer_norm, read_mha_sizes
from polyhead.families.common.tasks import (
    ANSWERS,
    CLASSIFICATION_HEAD,
    MASKED,
    PRE_TRAINING,
    Heads,
    read_head,
    write_head,
)
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.roberta import read_offset

_FREQUENCIES = "rotary_embeddings.inv_freq"


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    rotary = keys.choice("position_embedding_type", {"absolute": False, "rotary": True})
    theta, stated = keys.positive("rope_theta"), keys.numbers("rope_frequencies", [])
    rope, offset = None, 0
    if not rotary:
        offset = read_offset(keys, sizes.max_positions)
    elif stated:
        rope = RopeConfig(theta, "explicit", frequencies=tuple(stated))
    else:
        rope = RopeConfig(theta)
    mask = keys.whole("mask_token_id", None)
    dropped = keys.flag("token_dropout", False)
    if dropped and mask is None:
        raise keys.refused("mask_token_id", mask, "an id, as token_dropout is true")
    keys.expect("hidden_act", "gelu")
    return read_encoder(
        keys,
        read_layers(keys, sizes, norm, "pre", rope=rope),
        max_positions=sizes.max_positions - offset,
        embedding=EmbeddingConfig(
            positions=None if rotary else "learned",
            position_offset=offset,
            norm=norm if keys.flag("emb_layer_norm_before", False) else None,
            token_dropout=TokenDropoutConfig(mask) if dropped and mask is not None else None,
        ),
        final_norm=norm,
        **read_head(
            keys,
            HeadTransformConfig(None, "gelu", norm=norm),
            pooled=(POOLER,),
            without=(ANSWERS, PRE_TRAINING),
        ),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    embedding, attention = config.embedding, config.layers[0].attention
    rope: RopeConfig | None = getattr(attention, "rope", None)
    dropout = embedding.token_dropout
    values = {
        "position_embedding_type": "absolute" if rope is None else "rotary",
        "max_position_embeddings": config.max_positions + embedding.position_offset,
        "emb_layer_norm_before": embedding.norm is not None,
        "token_dropout": dropout is not None,
        **({} if dropout is None else {"mask_token_id": dropout.token_id}),
        **write_head(config, "Esm"),
    }
    if rope is not None and rope.frequencies is not None:
        values["rope_frequencies"] = list(rope.frequencies)
    return values


def observed(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rotary frequencies of a file that follow from no setting."""
    found = next((tensors[name] for name in tensors if name.endswith(_FREQUENCIES)), None)
    theta = values.get("rope_theta", 10_000.0)
    if found is None or not isinstance(theta, int | float):
        return {}
    dim = 2 * found.numel()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    stated = found.float().cpu()
    if torch.equal(stated, 1.0 / theta**exponents):
        return {}
    return {"rope_frequencies": stated.tolist()}


HEADS = Heads(
    "lm_head.decoder",
    masked=(
        Rule("lm_head.dense", "head.transforms.0.dense"),
        Rule("lm_head.layer_norm", "head.transforms.0.norm"),
        Rule("lm_head.bias", "head.bias"),
    ),
    texts=CLASSIFICATION_HEAD,
    others=r"lm_head\..+",
    dropped=POSITIONS
    | {
        r"pooler\.dense\.(weight|bias)": "comes after the hidden states",
        r"contact_head\..+": "reads attention weights, beside the hidden states",
        # transformers 5 saves them under a name with a star in place of the layer.
        r"(encoder\.layer\.(\d+|\*)\.attention\.self\.)?rotary_embeddings\.inv_freq": "read with "
        "the configuration, if they do not follow from it",
    },
)
_RULES = (
    *(rule for rule in EMBEDDINGS if rule.theirs != "embeddings.LayerNorm"),
    Rule("embeddings.layer_norm", "embedding.norm"),
    *layers("attention.LayerNorm", "LayerNorm"),
    Rule("encoder.emb_layer_norm_after", "final_norm"),
)


def table(values: Mapping[str, Any]) -> Tensors:
    # transformers 5 saves the layers' norms under the old names.
    made = HEADS.table(values, _RULES, "esm.", leaves=OLD_LEAVES)
    if values.get("position_embedding_type") != "rotary":
        return made
    unused = {r"embeddings\.position_embeddings\.weight": "positions are rotary"}
    stated = values.get("rope_frequencies")
    return replace(
        made,
        dropped={**made.dropped, **unused},
        constants={_FREQUENCIES: stated} if stated else {},
    )


FAMILIES = (
    Family(
        "esm",
        "Esm",
        read,
        table,
        defaults={
            **WITHOUT_TYPES,
            "pad_token_id": None,
            "eos_token_id": 2,
            "position_embedding_type": "absolute",
            "rope_theta": 10_000.0,
            "max_position_embeddings": 1026,
            "token_dropout": False,
            "mask_token_id": None,
            "emb_layer_norm_before": None,
        },
        write=write,
        with_head=MASKED,
        not_supported={**ONLY_ENCODER, "is_folding_model": "the folding trunk is not built"},
        # Without effect on a model that does not fold.
        harmless=frozenset(("esmfold_config", "vocab_list")),
        observed=observed,
    ),
)
