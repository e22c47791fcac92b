"""GGUF files of DeepSeek V2, V3 and of GLM-5, which has sparse attention beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyhead.families.common.gguf import Gguf, Joined
from polyhead.families.common.mixtures import CHOICE_BIAS, GGUF_MIXTURE, without_drafts

_SIGMOID = 2


def _is_third(metadata: Mapping[str, Any]) -> bool:
    return metadata.get("deepseek2.expert_gating_func") == _SIGMOID


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """Newer files say the sizes of the heads as the cache holds them and, beside, as they are."""
    rotated = values.get("qk_rope_head_dim", 0)
    size = values.get(".key_length_mla", values.get(".key_length", 0))
    groups = values.get("n_group", 1)
    stated = {
        "num_key_value_heads": values["num_attention_heads"],
        "q_lora_rank": values.get("q_lora_rank"),
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": values.get(".value_length_mla", values.get(".value_length")),
        "n_group": groups,
        "topk_group": values.get("topk_group", 1),
        "norm_topk_prob": values.get("norm_topk_prob", False),
        "routed_scaling_factor": values.get("routed_scaling_factor", 1.0),
    }
    if values.get(".gating") != _SIGMOID:
        stated["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    scaling, multiplier = values.get("rope_scaling"), values.get(".log_multiplier")
    if scaling is not None and multiplier is not None:
        scale = round(10 * multiplier, 6)  # float32 in the file, and 0.1 times what it stands for
        stated["rope_scaling"] = {**scaling, "mscale": scale, "mscale_all_dim": scale}
    return stated


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Keys ``[H, R, N]`` and values ``[H, V, R]`` as the rows of one matrix."""
    keys, values = parts
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


_PARTS = ("blk.{i}.attn_k_b.weight", "blk.{i}.attn_v_b.weight")
JOINED_LATENTS = (Joined("blk.{i}.attn_kv_b.weight", _PARTS, _joined),)
"""Of GGUF files, the projection of latents, which newer ones cut."""
_GGUF = Gguf(
    "deepseek2",
    settings={
        **GGUF_MIXTURE,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.key_length": ".key_length",
        "attention.value_length": ".value_length",
        "attention.key_length_mla": ".key_length_mla",
        "attention.value_length_mla": ".value_length_mla",
        "rope.dimension_count": "qk_rope_head_dim",
        "rope.scaling.yarn_log_multiplier": ".log_multiplier",
        "expert_gating_func": ".gating",
    },
    names=CHOICE_BIAS,
    joined=JOINED_LATENTS,
    values=_from_gguf,
)

SECOND = replace(_GGUF, fits=lambda metadata: not _is_third(metadata))
THIRD = replace(_GGUF, fits=_is_third)


def _sparse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without an indexer of their own read an earlier one's; newer files list them."""
    count = without_drafts(values)["num_hidden_layers"]
    names = (f"blk.{i}.indexer.attn_k.weight" for i in range(count))
    own = values.get(".indexers")
    if not isinstance(own, list):
        own = [name in values[".tensors"] for name in names]
    return {
        **_from_gguf(values),
        "num_hidden_layers": count,
        "indexer_types": ["full" if each else "shared" for each in own[:count]],
    }


SPARSE = replace(
    _GGUF,
    arch="glm-dsa",
    settings={
        **_GGUF.settings,
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
        "attention.indexer.types": ".indexers",
    },
    values=_sparse,
    saved=False,  # the converter cuts the projection of latents
)
