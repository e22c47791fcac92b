from harness import TIED, Case, ropes

CASES = (
    Case(
        "bloom",
        {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "n_layer": 2,
            "n_head": 4,
        },
        axes=(TIED, ({}, {"n_head": 6, "hidden_size": 48})),
    ),
    Case(
        "mpt",
        {
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
        },
        axes=(
            TIED,
            ({}, {"n_heads": 6, "d_model": 48}),
            ({}, *({"attn_config": each} for each in ({"clip_qkv": 0.5}, {"softmax_scale": 0.5}))),
        ),
    ),
    Case(
        "falcon",
        {"num_key_value_heads": None, "intermediate_size": None, "ffn_hidden_size": 40},
        axes=(
            TIED,
            (
                {},
                {"new_decoder_architecture": True, "num_kv_heads": 2},
                {
                    "new_decoder_architecture": True,
                    "num_kv_heads": 2,
                    "num_ln_in_parallel_attn": 1,
                },
                {"multi_query": False},
                {"parallel_attn": False},
                {"multi_query": False, "parallel_attn": False},
            ),
            ({}, {"alibi": True}, {"alibi": True, "num_attention_heads": 8}, *ropes(8)[1:]),
            ({}, {"bias": True}, {"activation": "relu"}),
        ),
        # Written out, the attention of transformers adds ALiBi twice.
        attention="sdpa",
    ),
)
