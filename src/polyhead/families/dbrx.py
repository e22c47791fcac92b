"""DBRX (Databricks 2024): LayerNorms without bias, clipped queries, keys and values, experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.families.common.config_json import HARMLESS
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import ACTIVATIONS, divided, read_decoder
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import At, Pieces, QKVRows, Transposed
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.common.writing import write_activation

_EXPERT = "layers.{i}.feed_forward.experts.{j}."
_THETA = 10_000.0


@dataclass(frozen=True)
class ExpertRows(Pieces):
    """Cut into the rows of each expert, which lie one behind the other: ``[X · F, E]``."""

    def count(self, at: At) -> int:
        return at.experts

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return torch.tensor_split(tensor, at.experts)


def read(keys: Keys) -> TransformerConfig:
    embed_dim, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    max_positions, count = (
        keys.whole("max_position_embeddings"),
        keys.num_layers("num_hidden_layers"),
    )
    head_dim = divided(keys, embed_dim, num_heads)
    inner = _part(keys, "attn_config")
    stated = {"rope_theta": inner.number("rope_theta", None)}
    if keys.has("rope_parameters"):
        stated = {"rope_parameters": keys.take("rope_parameters")}
    rope = read_rope(
        Keys({key: value for key, value in stated.items() if value is not None}, keys.where),
        head_dim,
        max_positions,
        theta=_THETA,
    )
    attention = AttentionConfig(
        num_heads,
        inner.whole("kv_n_heads", 1),
        head_dim,
        rope=rope,
        qkv_clip=inner.number("clip_qkv", None),
        dropout=inner.number("attn_pdrop", 0.0),
    )
    inner.finish(_INNER)
    dropout = keys.number("resid_pdrop")
    norm = NormConfig("layernorm", eps=1e-5)
    layer = LayerConfig(attention, _mixture(keys, embed_dim), norm, dropout=dropout)
    keys.take("num_key_value_heads", None)  # repeats attn_config
    return read_decoder(keys, [layer] * count, max_positions=reach(rope, max_positions), norm=norm)


def _part(keys: Keys, key: str) -> Keys:
    values = keys.take(key, None) or {}
    if not isinstance(values, Mapping):
        raise keys.refused(key, values, "an object")
    return Keys(values, f"{keys.where}: {key}")


def _mixture(keys: Keys, embed_dim: int) -> MixtureConfig:
    inner = _part(keys, "ffn_config")
    inner.expect("hidden_size", embed_dim)
    named = inner.take("ffn_act_fn", None) or {"name": "silu"}
    if not isinstance(named, Mapping) or named.get("name") not in ACTIVATIONS or len(named) > 1:
        raise inner.refused("ffn_act_fn", named, "an object with the name of an activation")
    order = inner.number("moe_normalize_expert_weights", None)
    if "moe_normalize_expert_weights" not in (keys.take("ffn_config", None) or {}):
        order = 1.0
    if order not in (None, 1.0):
        raise inner.refused("moe_normalize_expert_weights", order, "1 (a sum of 1) or null")
    mixture = MixtureConfig(
        FeedForwardConfig(
            inner.whole("ffn_hidden_size", 3584), activation=ACTIVATIONS[named["name"]]
        ),
        inner.whole("moe_num_experts", 4),
        inner.whole("moe_top_k", 1),
        normalize=order is not None,
    )
    inner.finish(_INNER)
    return mixture


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    mixture: Any = config.layers[0].feed_forward
    theta = attention.rope.theta
    return {
        "attn_config": {
            "kv_n_heads": attention.num_kv_heads,
            "clip_qkv": attention.qkv_clip,
            "attn_pdrop": attention.dropout,
            "rope_theta": theta,
        },
        "ffn_config": {
            "hidden_size": config.embed_dim,
            "ffn_hidden_size": mixture.expert.hidden_dim,
            "ffn_act_fn": {"name": write_activation(mixture.expert.activation)},
            "moe_num_experts": mixture.num_experts,
            "moe_top_k": mixture.experts_per_token,
            "moe_normalize_expert_weights": 1.0 if mixture.normalize else None,
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "resid_pdrop": config.layers[0].dropout,
    }


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attn_config": {
            "kv_n_heads": values.get(".num_kv_heads", 1),
            "clip_qkv": values.get(".clip"),
            "rope_theta": values.get(".theta", _THETA),
        },
        "ffn_config": {
            "hidden_size": values["hidden_size"],
            "ffn_hidden_size": values.get(".width", 3584),
            "moe_num_experts": values.get(".experts", 4),
            "moe_top_k": values.get(".top_k", 1),
        },
    }


_BLOCK, _LAYER = "blocks.{i}.", "layers.{i}."
_INNER = HARMLESS | {
    "model_type",
    "moe_jitter_eps",
    "moe_loss_weight",
    "uniform_expert_assignment",
    "is_encoder_decoder",
}

FAMILIES = (
    Family(
        "dbrx",
        "Dbrx",
        read,
        Tensors(
            (
                Rule("wte", "embedding.tokens"),
                Rule("norm_f", "final_norm"),
                Rule(_BLOCK + "norm_attn_norm.norm_1", _LAYER + "attention_norm"),
                Rule(_BLOCK + "norm_attn_norm.norm_2", _LAYER + "feed_forward_norm"),
                Rule(
                    _BLOCK + "norm_attn_norm.attn.Wqkv",
                    tuple(f"{_LAYER}attention.{name}_proj" for name in "qkv"),
                    QKVRows(),
                ),
                Rule(_BLOCK + "norm_attn_norm.attn.out_proj", _LAYER + "attention.o_proj"),
                Rule(_BLOCK + "ffn.router.layer", _LAYER + "feed_forward.router"),
                Rule(_BLOCK + "ffn.experts.mlp.w1", _EXPERT + "gate_proj.weight", ExpertRows()),
                Rule(_BLOCK + "ffn.experts.mlp.v1", _EXPERT + "up_proj.weight", ExpertRows()),
                Rule(
                    _BLOCK + "ffn.experts.mlp.w2",
                    _EXPERT + "down_proj.weight",
                    ExpertRows(),
                    Transposed(),
                ),
            ),
            prefix="transformer.",
        ),
        defaults={
            "resid_pdrop": 0.0,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
        write=write,
        harmless=frozenset(("emb_pdrop",)),
        gguf=Gguf(
            "dbrx",
            settings={
                "attention.head_count_kv": ".num_kv_heads",
                "attention.clamp_kqv": ".clip",
                "attention.layer_norm_epsilon": None,
                "rope.freq_base": ".theta",
                "feed_forward_length": ".width",
                "expert_count": ".experts",
                "expert_used_count": ".top_k",
            },
            rules=EXPERTS,
            values=_from_gguf,
        ),
    ),
)
