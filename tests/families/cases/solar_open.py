from harness import TIED, Case, ropes

CASES = (
    Case(
        "solar_open",
        {
            "head_dim": 12,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"n_shared_experts": 2}, {"hidden_act": "gelu"}),
            ({}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.7}),
            ropes(12),
        ),
    ),
)
