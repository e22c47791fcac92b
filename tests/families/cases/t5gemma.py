from harness import SIZES, TIED, Case

_STACK = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "query_pre_attn_scalar": 12,
}
_NO = dict.fromkeys(key for key in SIZES if not key.endswith("token_id"))


def _stacks(encoder: dict[str, object], decoder: dict[str, object]) -> dict[str, object]:
    return {"encoder": _STACK | encoder, "decoder": _STACK | decoder}


CASES = (
    Case(
        "t5gemma",
        _NO | _stacks({}, {"num_hidden_layers": 2}) | {"vocab_size": 61},
        axes=(
            TIED,
            (
                {},
                _stacks({"hidden_size": 24, "num_hidden_layers": 2}, {"intermediate_size": 24}),
                _stacks({"attention_bias": True}, {"attention_bias": True}),
                _stacks(
                    {"attn_logit_softcapping": None, "query_pre_attn_scalar": 20},
                    {"final_logit_softcapping": None, "num_key_value_heads": 4},
                ),
                _stacks(
                    {"layer_types": ["full_attention"] * 3},
                    {"layer_types": ["sliding_attention"] * 3, "sliding_window": 7},
                ),
            ),
        ),
        auto="AutoModelForSeq2SeqLM",
    ),
)
