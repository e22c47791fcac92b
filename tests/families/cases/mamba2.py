from typing import Any

from harness import TIED, Case, rope

_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 128,
}
_OPTIONS = (
    {},
    {"mamba_conv_bias": False, "mamba_proj_bias": True},
    {"mamba_n_groups": 1, "mamba_d_conv": 2},
    {"time_step_limit": [0.5, 1.5]},
)

CASES = (
    Case(
        "bamba",
        {**_MAMBA, "attn_layer_indices": [1]},
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"mlp_bias": True}),
            _OPTIONS,
            ({}, {"attn_layer_indices": [0, 2]}, rope("linear", factor=4.0)),
        ),
        tokens=80,
    ),
    Case(
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.3,
        },
        axes=(
            TIED,
            ({}, {"attention_bias": True}, {"num_local_experts": 0}),
            _OPTIONS,
            ({}, {"position_embedding_type": "rope", **rope("linear", factor=4.0)}),
            ({}, {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0}),
        ),
        tokens=80,
    ),
    Case(
        "granitemoeshared",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.3,
        },
        axes=(TIED, ({}, {"attention_bias": True}, {"shared_intermediate_size": 0})),
    ),
)
