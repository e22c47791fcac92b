from harness import TIED, Case, ropes

_QWEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DENSE = ({}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2})

CASES = (
    Case(
        "mixtral",
        {"num_local_experts": 5, "head_dim": 8},  # scaled rotary types fail there without head_dim
        axes=(
            TIED,
            ({}, {"num_experts_per_tok": 3}, {"num_key_value_heads": 4}),
            ({}, {"sliding_window": 7}),
            ropes(8),
        ),
    ),
    Case(
        "qwen2_moe",
        {**_QWEN, "num_experts": 5, "shared_expert_intermediate_size": 28},
        axes=(
            TIED,
            _DENSE,
            ({}, {"norm_topk_prob": True}, {"qkv_bias": False}),
            ({}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ),
    ),
    Case(
        "qwen3_moe",
        {**_QWEN, "num_local_experts": 5},
        axes=(
            TIED,
            _DENSE,
            ({}, {"norm_topk_prob": True}, {"attention_bias": True}, {"head_dim": 12}),
            ({}, {"use_sliding_window": True, "sliding_window": 7}),
        ),
    ),
    Case(
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12},
        axes=(TIED, ({}, {"rotary_dim": 8}, {"num_key_value_heads": 4})),
    ),
    Case(
        "olmoe",
        {"num_experts": 5, "num_experts_per_tok": 2},
        axes=(
            TIED,
            ({}, {"norm_topk_prob": True}, {"attention_bias": True}),
            ({}, {"clip_qkv": 0.4}),
        ),
    ),
    Case(
        "granitemoe",
        {
            "num_local_experts": 5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        axes=(TIED, ({}, {"attention_bias": True}, {"num_experts_per_tok": 3})),
    ),
)
