from harness import Case

CASES = (
    Case(
        "cpmant",
        {
            "dim_ff": 40,
            "dim_head": 8,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "num_key_value_heads": None,
            "position_bias_max_distance": 20,
            "position_bias_num_buckets": 16,
            "prompt_length": 6,
            "prompt_types": 3,
            "segment_types": 3,
        },
        axes=(
            ({}, {"auto": "AutoModel"}),
            ({}, {"prompt_length": 1}, {"prompt_length": 30}),
            ({}, {"prompt_types": 5}, {"segment_types": 4}),
            ({}, {"position_bias_num_buckets": 9}, {"position_bias_max_distance": 6}),
            ({}, {"dim_head": 12}, {"eps": 0.1}, {"tie_word_embeddings": False}),
        ),
        pads_left=True,
    ),
)
