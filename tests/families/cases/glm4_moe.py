from harness import TIED, Case, rope

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
    ),
)
