from harness import TIED, Case, ropes

CASES = (
    Case(
        "cohere",
        {"logit_scale": 0.6},
        axes=(TIED, ({}, {"use_qk_norm": True}, {"attention_bias": True}), ropes(8)),
    ),
    Case(
        "cohere2",
        {"head_dim": 12, "sliding_window": 7, "logit_scale": 0.6, "num_hidden_layers": 4},
        axes=(
            TIED,
            ({}, {"attention_bias": True}),
            ({}, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ),
    ),
)
