from typing import Any

from harness import Case

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 10,
    "sliding_window_size": 7,
    "d_rel": 5,
    "rel_extent": 9,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 1.5,
}

CASES = (
    Case(
        "inkling_text",
        _SIZES,
        axes=(
            ({}, {"unpadded_vocab_size": 57}, {"unpadded_vocab_size": 90}),
            ({}, {"log_scaling_n_floor": 4}, {"log_scaling_n_floor": 6, "log_scaling_alpha": 0.7}),
            ({}, {"layer_types": None}, {"local_layer_ids": [0, 2], "layer_types": None}),
            (
                {},
                {"n_shared_experts": 1},
                {"mlp_layer_types": None},
                {"mlp_layer_types": None, "dense_mlp_idx": 2},
            ),
            ({}, {"conv_kernel_size": 2}, {"rel_extent": 40}, {"hidden_act": "gelu"}),
        ),
    ),
)
