from harness import TIED, Case, rope

_YARN = rope(
    "yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=16,
)  # fmt: skip

CASES = (
    Case(
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "sliding_window": 7,
            **_YARN,
        },
        axes=(
            TIED,
            ({}, {"swiglu_limit": 0.3}, {"attention_bias": False}),
            ({}, rope("default"), {"num_key_value_heads": 4}),
            ({}, {"layer_types": ["full_attention", "sliding_attention"]}),
        ),
    ),
    Case(
        "phimoe",
        {"num_local_experts": 5},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"sliding_window": 7}),
            ({}, {"lm_head_bias": True}, {"router_jitter_noise": 0.3}),
        ),
    ),
)
