from harness import Case

CASES = (
    Case(
        "glm5_next_text",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "moe_intermediate_size": 20,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "swiglu_limit": 2.0,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 4,
            # With few heads of the indexer many scores are 0, and which are chosen is chance.
            "index_n_heads": 16,
            "index_head_dim": 8,
            "index_topk": 12,
            "index_kpool": 4,
        },
        axes=(
            ({}, {"attention_bias": True}, {"norm_topk_prob": False}, {"n_shared_experts": 2}),
            ({}, {"mlp_layer_types": None}, {"layer_types": None}, {"index_kpool": 3}),
            ({}, {"linear_lower_bound": None}, {"linear_conv_kernel_dim": 2}, {"index_topk": 48}),
            (
                {},
                {  # first a state: without positions pools of equal tokens would be equal
                    "layer_types": ["linear_attention"] + ["indexed_attention"] * 3,
                    "indexer_types": ["full", "full", "shared", "full"],
                },
                {"hc_mult": 2, "hc_eps": 1e-3},
            ),
        ),
        auto="Glm5NextTextModel",
        tokens=40,
        # Decays down to e^-5 a token cost transformers' chunks digits.
        error=3e-4,
        gradient_error=1e-3,
    ),
)
