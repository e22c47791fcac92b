from harness import TIED, Case

_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_SCALED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
}

CASES = (
    Case(
        "gemma3_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": _TYPES,
        },
        axes=(
            TIED,
            ({}, {"num_key_value_heads": 1}, {"attention_bias": True}),
            ({}, {"final_logit_softcapping": 5.0}, {"query_pre_attn_scalar": 12}),
            ({}, _SCALED),
        ),
    ),
)
