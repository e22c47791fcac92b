from harness import TIED, Case, rope

_SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_YARN = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.707,
)

CASES = (
    Case(
        "deepseek_v2",
        _SIZES,
        axes=(
            TIED,
            ({}, {"q_lora_rank": None}, {"attention_bias": True, "mlp_bias": True}),
            ({}, {"topk_method": "group_limited_greedy"}, {"first_k_dense_replace": 2}),
            ({}, _YARN),
        ),
    ),
    Case(
        "deepseek_v3",
        _SIZES,
        axes=(
            TIED,
            ({}, {"q_lora_rank": None, "attention_bias": True}, {"rope_interleave": False}),
            ({}, {"first_k_dense_replace": 0, "norm_topk_prob": False}),
            ({}, _YARN),
        ),
    ),
)
