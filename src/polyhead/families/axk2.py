"""A.X K2 (SK Telecom 2026): DeepSeek-V3.2's latent attention with indexers, whose queries are made
beside a gate of what heads give, and norms before parts that gate what they give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.config import LayerConfig, MixtureConfig, NormGateConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families import deepseek
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.steps import At, Each, Pieces
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    found = deepseek.read(keys, "sigmoid", sparse_attention="own", listed=True)
    rank = keys.size("gated_norm_rank")
    return replace(found, layers=tuple(_changed(each, rank) for each in found.layers))


def _changed(layer: LayerConfig, rank: int) -> LayerConfig:
    """DeepSeek-V3.2's layer as A.X K2 has it."""
    attention: Any = layer.attention
    network, sparse = layer.feed_forward, isinstance(layer.feed_forward, MixtureConfig)
    if isinstance(network, MixtureConfig) and network.groups > 1:
        network = replace(network, closed_score=0.0)
    return replace(
        layer,
        attention=replace(attention, query_gate=True),
        feed_forward=network,
        norm_gate=NormGateConfig(rank, feed_forward=sparse),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    gate = config.layers[0].norm_gate
    if gate is None:
        raise ConfigError("this family has gates of what norms before the parts give")
    values = deepseek.write(config)
    if values.get("n_group") == 1:
        values |= {"n_group": None, "topk_group": None}
    return values | {"gated_norm_rank": gate.rank}


@dataclass(frozen=True)
class QueryGateRows(Pieces):
    """Cut rows that stand as ``[H, D + V]``: the query of a head, and the gate of its output."""

    def count(self, at: At) -> int:
        return 2

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        a = at.attention
        heads = tensor.reshape(a.num_heads, -1, *tensor.shape[1:])
        return [part.flatten(0, 1) for part in heads.tensor_split([a.qk_head_dim], dim=1)]

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        heads = at.attention.num_heads
        parts = [each.reshape(heads, -1, *each.shape[1:]) for each in tensors]
        return torch.cat(parts, dim=1).flatten(0, 1)


_LAYER = "layers.{i}."
_GATE = {"W_down": "down_proj", "W_up": "up_proj"}
_RULES = (
    Rule(_LAYER + "input_layernorm.norm", _LAYER + "attention_norm"),
    *under(_LAYER + "input_layernorm.", _LAYER + "attention_norm_gate.", _GATE),
    *under(_LAYER + "post_attention_layernorm.", _LAYER + "feed_forward_norm_gate.", _GATE),
    Rule(
        _LAYER + "self_attn.q_b_proj",
        (_LAYER + "attention.q_b_proj", _LAYER + "attention.gate_proj"),
        QueryGateRows(),
        Each((deepseek.LatentPairs(),), ()),
    ),
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """DeepSeek-V3.2's names and A.X K2's own; norms before mixtures have gates."""
    kinds = values.get("mlp_layer_types")
    if not isinstance(kinds, list):
        first, count = values.get("first_k_dense_replace", 1), values["num_hidden_layers"]
        kinds = ["dense" if i < first else "sparse" for i in range(count)]
    gated = [i for i, kind in enumerate(kinds) if kind == "sparse"]
    norms = (
        Rule(f"layers.{i}.post_attention_layernorm.norm", f"layers.{i}.feed_forward_norm")
        for i in gated
    )
    return deepseek.tensors(values).extended(*norms, *_RULES)


FAMILIES = (
    Family(
        "axk2",
        "AXK2",
        read,
        tensors,
        defaults={
            **deepseek.V32_DEFAULTS,
            "num_key_value_heads": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 131_072,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 128,
            "q_lora_rank": 384,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "moe_intermediate_size": 512,
            "n_routed_experts": 128,
            "n_group": None,
            "topk_group": None,
            "index_n_heads": 16,
            "gated_norm_rank": 16,
            "bos_token_id": 163_691,
            "eos_token_id": 163_691,
        },
        write=write,
        harmless=deepseek.HARMLESS,
    ),
)
