from harness import TIED, Case, ropes

_KINDS = ["sliding_attention", "full_attention"]

CASES = (
    Case(
        "olmo",
        axes=(
            TIED,
            ({}, {"clip_qkv": 0.4}, {"attention_bias": True}),
            ({}, {"num_key_value_heads": None}),
            ropes(8),
        ),
    ),
    Case(
        "olmo2",
        axes=(TIED, ({}, {"attention_bias": True}, {"num_key_value_heads": 4}), ropes(8)),
    ),
    Case(
        "olmo3",
        {"sliding_window": 7},
        axes=(TIED, ({}, {"layer_types": _KINDS}, {"attention_bias": True})),
    ),
)
