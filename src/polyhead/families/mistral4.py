"""Mistral 4 (2026): DeepSeek-V3's latents, with queries that grow by position, and a mixture whose
gate is a softmax over all experts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from polyhead.config import (
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.config.attention import QueryTemperatureConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import dense_layers, write_networks
from polyhead.families.common.reading import read_decoder, read_network
from polyhead.families.common.rope import states_rope, write_scaling
from polyhead.families.deepseek import HARMLESS, reach_of, read_attention, tensors, write_attention
from polyhead.families.ministral import BETA, read_temperature

_PART = "partial_rotary_factor"
_TEMPERATURE = QueryTemperatureConfig(0.1, 8192)
_ROPE = RopeConfig(
    1e4,
    "yarn",
    factor=128.0,
    original_max_positions=8192,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def read(keys: Keys) -> TransformerConfig:
    max_positions, stated = keys.whole("max_position_embeddings"), states_rope(keys)
    attention = read_attention(
        keys,
        max_positions,
        of_key=True,
        states_trained=True,
        read_elsewhere=(BETA, "max_position_embeddings", _PART),
        unstated=_ROPE,
    )
    temperature = _read_temperature(keys, attention) if stated else _TEMPERATURE
    attention = replace(attention, query_temperature=temperature)
    keys.flag("rope_interleave")  # the table of names reads it
    keys.expect("sliding_window", None)  # as files of Mistral's other families have it
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    dense, mixture = read_network(keys), _read_mixture(keys)
    are_dense = dense_layers(keys, keys.num_layers("num_hidden_layers"), [])
    layers = [LayerConfig(attention, dense if each else mixture, norm) for each in are_dense]
    return read_decoder(keys, layers, max_positions=reach_of(attention, max_positions), norm=norm)


def _read_temperature(keys: Keys, attention: LatentAttentionConfig) -> QueryTemperatureConfig:
    """How queries grow, from the rope parameters, which repeat a share of the key's sizes."""
    values: Any = keys.take("rope_parameters", None) or keys.take("rope_scaling")
    share = attention.qk_rope_head_dim / attention.qk_head_dim
    part = Keys(values, f"{keys.where}: rope_parameters").number(_PART, share)
    if not math.isclose(part, share, rel_tol=1e-6):
        raise keys.refused(_PART, part, f"{share}, the rotary part of a key")
    return read_temperature(keys)


def _read_mixture(keys: Keys) -> MixtureConfig:
    dense, width = read_network(keys), keys.whole("moe_intermediate_size")
    beside = keys.whole("n_shared_experts")
    return MixtureConfig(
        replace(dense, hidden_dim=width),
        keys.whole("n_routed_experts"),
        keys.whole("num_experts_per_tok"),
        shared=replace(dense, hidden_dim=beside * width),
        normalize=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor"),
        groups=keys.whole("n_group"),
        groups_per_token=keys.whole("topk_group"),
        group_score="best two",
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    temperature, rope = attention.query_temperature, attention.rope
    networks = {k: v for k, v in write_networks(config).items() if k != "topk_method"}
    return {
        **write_attention(attention),
        **networks,
        "head_dim": attention.qk_head_dim,
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": rope.type,
            "rope_theta": rope.theta,
            **write_scaling(rope),
            BETA: temperature.scale,
            "original_max_position_embeddings": temperature.every,
            _PART: attention.qk_rope_head_dim / attention.qk_head_dim,
        },
    }


FAMILIES = (
    Family(
        "mistral4",
        "Mistral4",
        read,
        tensors,
        defaults={
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "rope_interleave": True,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 11,
        },
        write=write,
        harmless=HARMLESS,
    ),
)
