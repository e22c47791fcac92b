from harness import TIED, Case

_KINDS = ["sliding_attention", "full_attention"]
_ONE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_SCALED = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 900.0,
            "partial_rotary_factor": 0.5,
            "factor": 4.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
}

_SIZES = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 7,
    "layer_types": 2 * _KINDS,
}

CASES = (
    Case(
        "gemma4_unified_text",
        _SIZES,
        axes=(
            TIED,
            ({}, {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}, _ONE),
            ({}, {"attention_bias": True}, {"final_logit_softcapping": 5.0}),
            ({}, _SCALED),
        ),
    ),
    Case(
        "gemma4_text",
        {**_SIZES, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 61},
        axes=(
            TIED,
            (
                {},
                {"num_kv_shared_layers": 2},
                {"num_kv_shared_layers": 2, **_ONE},
                _ONE,
                # With shared layers too, transformers' own code fails at this.
                {"hidden_size_per_layer_input": 0},
            ),
            ({}, {"attention_bias": True}),
            ({}, {"use_double_wide_mlp": True}, {"final_logit_softcapping": 5.0}),
            ({}, _SCALED),
        ),
        # Of the norms of vectors: transformers' float32 is 1.4e-4 from our model in float64, ours
        # 2.4e-5.
        gradient_error=3e-4,
    ),
)
