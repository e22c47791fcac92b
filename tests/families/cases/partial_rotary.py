from harness import TIED, Case, rope, ropes

_QK_NORMS = ({"qk_layernorm": True}, {"qk_layernorm": False})
_GROUPS = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1})

CASES = (
    Case(
        "phi",
        axes=(
            TIED,
            _GROUPS,
            _QK_NORMS,
            ({}, {"hidden_act": "relu"}),
            (*ropes(4), rope("default", partial_rotary_factor=1.0)),
        ),
    ),
    Case(
        "persimmon",
        {"num_key_value_heads": None},
        axes=(TIED, _QK_NORMS, (*ropes(4), rope("default", partial_rotary_factor=0.75))),
    ),
    Case(
        "stablelm",
        axes=(
            TIED,
            _GROUPS,
            _QK_NORMS,
            ({}, {"use_parallel_residual": True}),
            ({}, {"use_qkv_bias": True}, {"hidden_act": "gelu"}),
            (*ropes(2), rope("default", partial_rotary_factor=0.75)),
        ),
    ),
    Case(
        "starcoder2",
        axes=(
            TIED,
            _GROUPS,
            ({}, {"use_bias": False}, {"hidden_act": "relu"}),
            ({}, {"sliding_window": 7}),
            ropes(8),
        ),
    ),
)
