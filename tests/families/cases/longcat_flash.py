from collections.abc import Mapping
from typing import Any

import torch
from harness import TIED, Case, rope


def _without_unread(model: Any, options: Mapping[str, Any]) -> None:
    """transformers has matrices for the experts that give back their input too; they are 0 here."""
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.experts.gate_up_proj[model.config.n_routed_experts :] = 0.0


CASES = (
    Case(
        "longcat_flash",
        {
            "num_hidden_layers": None,
            "num_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "expert_ffn_hidden_size": 20,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 4,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"rms_norm_eps": 0.1}),
            ({}, {"routed_scaling_factor": 1.5}, {"zero_expert_num": 0}),
            (
                {},
                rope(
                    "yarn",
                    factor=4.0,
                    original_max_position_embeddings=16,
                    mscale=1.0,
                    mscale_all_dim=0.707,
                ),
            ),
        ),
        alter=_without_unread,
    ),
)
