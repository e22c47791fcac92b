from harness import TIED, Case

_KINDS = ["sliding_attention", "full_attention"]
_ONE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
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

_SHARED = {"num_kv_shared_layers": 2}
# The last of several layers of a kind hands on its keys, not the first.
_LAST_OF_TWO = {
    "layer_types": [_KINDS[1], _KINDS[0], _KINDS[1], _KINDS[1]],
    "num_kv_shared_layers": 1,
}
# A list that does not end with a full layer: transformers makes it one.
_ENDS_FULL = {"layer_types": [_KINDS[1], _KINDS[0], _KINDS[0], _KINDS[0]]}

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
            ({}, {**_SHARED, "use_double_wide_mlp": True}, _ONE, _LAST_OF_TWO, _ENDS_FULL),
            ({}, {"attention_bias": True}, {"final_logit_softcapping": 5.0}),
            ({}, _SCALED),
        ),
        spread=0.1,
        # Of the float32 logits transformers' are up to 2.2e-5 from our model in float64, ours up to
        # 4.5e-5, and the two up to 5.5e-5 apart.
        error=1e-4,
    ),
    Case(
        "gemma4_text",
        {**_SIZES, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 61},
        axes=(
            TIED,
            (
                {},
                _SHARED,
                {**_SHARED, **_ONE},
                _ONE,
                _LAST_OF_TWO,
                # With shared layers too, transformers' own code fails at this.
                {"hidden_size_per_layer_input": 0},
            ),
            ({}, {"attention_bias": True}, _EXPERTS, {**_EXPERTS, "top_k_experts": 1}),
            ({}, {"use_double_wide_mlp": True}, {"final_logit_softcapping": 5.0}),
            ({}, _SCALED),
        ),
        spread=0.1,
        # Over 60 draws transformers' float32 logits are up to 3.4e-5 from our model in float64,
        # ours up to 5.0e-5, and the two up to 5.9e-5 apart.
        error=1e-4,
        # With a softcap, half a unit in float32's last place of each weight moves the gradients of
        # our model in float64 by up to 2.6e-4.
        gradient_error=3e-4,
    ),
)
