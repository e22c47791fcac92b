from harness import TIED, Case

_SIZES = {"num_key_value_heads": None, "pad_token_id": 1}
_ACTIVATIONS = ({}, {"activation_function": "gelu_new"})
_SCALED = ({}, {"scale_embedding": False})

CASES = (
    Case(
        "opt",
        _SIZES | {"intermediate_size": None, "ffn_dim": 40},
        axes=(
            TIED,
            _ACTIVATIONS,
            ({}, {"do_layer_norm_before": False}, {"_remove_final_layer_norm": True}),
            ({}, {"word_embed_proj_dim": 20}),
            ({}, {"enable_bias": False}, {"layer_norm_elementwise_affine": False}),
        ),
    ),
    Case("biogpt", _SIZES, axes=(TIED, _SCALED, ({}, {"hidden_act": "silu"}))),
    Case(
        "xglm",
        {
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 40,
            "pad_token_id": 1,
        },
        axes=(TIED, _SCALED, _ACTIVATIONS),
    ),
)
