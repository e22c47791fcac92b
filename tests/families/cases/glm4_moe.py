from collections.abc import Iterable
from typing import Any

import torch
from gguf_files import GgufCase, choice_bias, fused_qkv, routed
from harness import TIED, Case, rope, ropes
from torch import Tensor


def _settings(config: Any) -> dict[str, Any]:
    """A layer of multi-token prediction follows the two of the model."""
    return {
        **routed(config),
        "block_count": 3,
        "nextn_predict_layers": 1,
        "expert_gating_func": 2,
        "rope.dimension_count": 4,
    }


def _ling(config: Any) -> dict[str, Any]:
    """Ling 2.0, of which one layer predicts a second token too."""
    width = config.moe_intermediate_size * config.n_shared_experts
    return {**_settings(config), "expert_shared_feed_forward_length": width}


def _dots(config: Any) -> dict[str, Any]:
    """dots.llm1 has no groups in its published file."""
    groups = {"expert_group_count": None, "expert_group_used_count": None}
    return {**routed(config), **groups, "attention.sliding_window": None, "expert_gating_func": 2}


def _with_a_draft(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    yield from choice_bias(name, tensor, config)
    if name == "model.norm.weight":
        yield "blk.2.nextn.eh_proj.weight", torch.ones(2, 2)


def _minicpm3(config: Any) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": None,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


CASES = (
    Case(
        "glm4_moe",
        {
            "head_dim": 8,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        axes=(
            TIED,
            ({}, {"use_qk_norm": True}, {"attention_bias": True}),
            ({}, {"first_k_dense_replace": 0, "routed_scaling_factor": 1.7}),
            ({}, {"norm_topk_prob": False}, rope("default", partial_rotary_factor=1.0)),
        ),
        gguf=GgufCase("glm4moe", _settings, _with_a_draft, {"use_qk_norm": True}),
        more_gguf=(
            GgufCase("bailingmoe2", _ling, fused_qkv(_with_a_draft), {"use_qk_norm": True}),
        ),
    ),
    Case(
        "dots1",
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
        },
        axes=(
            TIED,
            ({}, {"sliding_window": 7, "max_window_layers": 1}, {"sliding_window": None}),
            ({}, {"attention_bias": True}, {"hidden_act": "gelu"}),
            ({}, {"n_group": 4, "topk_group": 2}, {"first_k_dense_replace": 0}),
            ({}, {"norm_topk_prob": True, "routed_scaling_factor": 1.7}),
            (*ropes(8), {"head_dim": 12}),  # longrope's factors are of 8 features
        ),
        gguf=GgufCase("dots1", _dots, choice_bias, {"norm_topk_prob": True}),
    ),
    Case(
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "scale_emb": 3,
            "dim_model_base": 16,
        },
        axes=(
            TIED,
            ({}, {"q_lora_rank": None}, {"attention_bias": True}, {"mlp_bias": True}),
            ({}, {"scale_depth": 0.7}, {"dim_model_base": 40}),
        ),
        gguf=GgufCase(
            "minicpm3",
            _minicpm3,
            # What no file says: the published model has these.
            options={"v_head_dim": 8, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
            written=False,
        ),
    ),
)
