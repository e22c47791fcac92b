from typing import Any

from harness import TIED, Case

_KINDS = ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"]
_SWA: dict[str, Any] = {
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 10,
    "swa_kv_lora_rank": 12,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 10,
    "swa_v_head_dim": 8,
}

CASES = (
    Case(
        "dots3_note_text",
        {
            **_SWA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "head_dim": 12,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "sliding_window": 7,
            "layer_types": _KINDS,
            "moe_intermediate_size": 20,
            "shared_experts_intermediate_size": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            # With few heads of the indexer many scores are 0, and which are chosen is chance.
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 6,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"n_group": 4, "topk_group": 2}),
            ({}, {"n_shared_experts": 2}, {"mlp_layer_types": ["sparse", "dense"] * 2}),
            ({}, {"use_dsa": False}, {"layer_types": None}, {"layer_types": _KINDS[2:] * 2}),
            ({}, {"rope_theta": 500.0, "swa_rope_theta": 100.0}, {"norm_topk_prob": False}),
        ),
    ),
)
