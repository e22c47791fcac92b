from harness import SIZES, TIED, Case

_STACK = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}
_TOWER = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 1,
}
_NO = dict.fromkeys(key for key in SIZES if not key.endswith("token_id"))


def _stacks(
    encoder: dict[str, object], decoder: dict[str, object], eoi: int = 9
) -> dict[str, object]:
    return {
        "encoder": {
            "text_config": _STACK | encoder,
            "vision_config": _TOWER,
            "eoi_token_index": eoi,
        },
        "decoder": _STACK | decoder,
    }


_STRETCHED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
}


CASES = (
    Case(
        "t5gemma2",
        _NO | _stacks({}, {}) | {"vocab_size": 61},
        axes=(
            TIED,
            (
                {},
                _stacks({"sliding_window": 5, "head_dim": 8}, {"intermediate_size": 24}),
                _stacks({"attention_bias": True}, {"attention_bias": True}, eoi=41),
                _stacks(
                    {"query_pre_attn_scalar": 20, **_STRETCHED},
                    {"final_logit_softcapping": 5.0, "num_key_value_heads": 4, **_STRETCHED},
                ),
                _stacks(
                    {"layer_types": ["full_attention"] * 2},
                    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
                    eoi=256_000,
                ),
                _stacks(
                    {"sliding_window": 1},
                    {"sliding_window": 1, "num_hidden_layers": 3}
                    | {"layer_types": ["sliding_attention"] * 3},
                ),
            ),
        ),
        auto="AutoModelForSeq2SeqLM",
    ),
)
