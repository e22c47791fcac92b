from harness import Case

_ATTENTION = {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10_000.0}
_EXPERTS = {
    "hidden_size": 32,
    "ffn_hidden_size": 24,
    "moe_num_experts": 5,
    "moe_top_k": 2,
    "moe_loss_weight": 0.0,
}

CASES = (
    Case(
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": _ATTENTION,
            "ffn_config": _EXPERTS,
            **dict.fromkeys(
                (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "max_position_embeddings",
                )
            ),
        },
        axes=(
            ({}, {"attn_config": _ATTENTION | {"clip_qkv": 2.0, "kv_n_heads": 1}}),
            ({}, {"ffn_config": _EXPERTS | {"moe_normalize_expert_weights": None}}),
        ),
    ),
)
