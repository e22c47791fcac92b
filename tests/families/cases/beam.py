from harness import TIED, Case

_THETA = {"rope_type": "default", "rope_theta": 40.0}

CASES = (
    Case(
        "beam",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "layer_types": 2 * ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", *3 * ["sparse"]],
            "sliding_window": 7,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"final_logit_softcapping": None}),
            ({}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.5}),
            ({}, {"mlp_layer_types": None}, {"mlp_layer_types": ["sparse", "dense"] * 2}),
            ({}, {"layer_types": None}, {"n_group": 1, "topk_group": 1}),
            (
                {},
                {"rope_parameters": {"sliding_attention": None, "full_attention": _THETA}},
                {"rope_parameters": {"sliding_attention": _THETA, "full_attention": _THETA}},
            ),
        ),
    ),
)
