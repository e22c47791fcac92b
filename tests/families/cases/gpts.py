from harness import TIED, Case, rope, ropes

_OWN_NAMES = {
    "hidden_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
_NO_GROUPS = {"num_key_value_heads": None}
_NETWORKS = ({}, {"n_inner": 40}, {"activation_function": "relu"})
_SCALES = ({}, {"scale_attn_weights": False})

CASES = (
    Case(
        "gpt2",
        _OWN_NAMES,
        axes=(TIED, _NETWORKS, _SCALES, ({"scale_attn_by_inverse_layer_idx": True}, {})),
    ),
    Case(
        "openai-gpt",
        _OWN_NAMES,
        axes=(TIED, ({}, {"afn": "relu"}, {"afn": "silu"}, {"afn": "swish"})),
    ),
    Case(
        "gpt_bigcode",
        _OWN_NAMES,
        axes=(TIED, _NETWORKS, _SCALES, ({}, {"multi_query": False})),
    ),
    Case(
        "gpt_neo",
        _NO_GROUPS
        | {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 7,
        },
        axes=(
            TIED,
            ({}, {"intermediate_size": None}, {"activation_function": "gelu"}),
            ({}, {"attention_types": [[["local"], 2]]}, {"attention_types": [[["global"], 2]]}),
        ),
    ),
    Case("gptj", _OWN_NAMES | {"rotary_dim": 4}, axes=(TIED, _NETWORKS, ({}, {"rotary_dim": 8}))),
    Case(
        "codegen",
        _OWN_NAMES | {"rotary_dim": 4},
        axes=(TIED, _NETWORKS, ({}, {"rotary_dim": 2}, {"n_head": 8, "n_embd": 48})),
    ),
    Case(
        "gpt_neox",
        _NO_GROUPS,
        axes=(
            TIED,
            ({}, {"use_parallel_residual": False}),
            ({}, {"attention_bias": False}, {"hidden_act": "relu"}),
            (*ropes(2), rope("default", partial_rotary_factor=1.0)),
        ),
    ),
    Case(
        "gpt_neox_japanese",
        _NO_GROUPS | {"intermediate_size": None, "intermediate_multiple_size": 2},
        axes=(TIED, ({}, rope("default", partial_rotary_factor=0.5)), ({}, {"hidden_act": "relu"})),
    ),
)
