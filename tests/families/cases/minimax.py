from harness import TIED, Case, ropes

CASES = (
    Case(
        "minimax",
        {
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "full_attention",
                "linear_attention",
                "linear_attention",
            ],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 16,
            "max_position_embeddings": 128,
        },
        axes=(
            TIED,
            ({}, {"head_dim": 16}, {"sliding_window": 20}, {"rms_norm_eps": 0.01}),
            ({}, {"layer_types": None}, {"hidden_act": "gelu"}),
            (
                {},
                {"full_attn_alpha_factor": 0.7, "full_attn_beta_factor": 1.3},
                {"linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 0.6},
                {"mlp_alpha_factor": 2.5, "mlp_beta_factor": 0.5},
            ),
            ropes(8)[:2],
        ),
        tokens=80,
    ),
    Case(
        "minimax_m3_vl_text",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "dense_intermediate_size": 36,
            "shared_intermediate_size": 20,
            "swiglu_limit": 0.5,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
        axes=(
            TIED,
            ({}, {"index_n_heads": 4}, {"index_topk_blocks": 3, "index_local_blocks": 2}),
            ({}, {"layer_types": ["minimax_m3_sparse"] * 2}, {"layer_types": None}),
            ({}, {"mlp_layer_types": ["dense", "sparse"]}, {"routed_scaling_factor": 1.5}),
            ({}, *ropes(4, partial_rotary_factor=0.5)[3:5]),
        ),
    ),
)
