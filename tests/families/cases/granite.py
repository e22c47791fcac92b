from harness import TIED, Case, ropes

CASES = (
    Case(
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        axes=(TIED, ({}, {"attention_bias": True}, {"mlp_bias": True}), ropes(8)),
    ),
)
