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
)
