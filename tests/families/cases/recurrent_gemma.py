from harness import TIED, Case

_STATE, _HEADS = "recurrent", "attention"

CASES = (
    Case(
        "recurrent_gemma",
        {"num_hidden_layers": 3, "attention_window_size": 7, "max_position_embeddings": None},
        axes=(
            TIED,
            ({}, {"lru_width": 24, "conv1d_width": 3}, {"num_key_value_heads": 1}),
            ({}, {"block_types": [_STATE, _HEADS]}, {"block_types": [_HEADS, _HEADS, _STATE]}),
            ({}, {"attention_bias": True}, {"logits_soft_cap": 2.0}),
            ({}, {"hidden_activation": "silu"}),
        ),
        # More than a chunk of states.
        tokens=80,
    ),
)
