from harness import TIED, Case

CASES = (
    Case(
        "llama4_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "intermediate_size_mlp": 28,
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 5,
            "attn_scale": 0.4,
        },
        axes=(
            TIED,
            ({}, {"moe_layers": [1]}, {"interleave_moe_layer_step": 2}),
            ({}, {"use_qk_norm": False}, {"attn_temperature_tuning": False}),
            ({}, {"attention_bias": True}, {"num_experts_per_tok": 2}),
        ),
    ),
)
