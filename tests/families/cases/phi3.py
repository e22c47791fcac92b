from harness import TIED, Case, ropes

CASES = (
    Case(
        "phi3",
        {"original_max_position_embeddings": 16},
        axes=(
            TIED,
            ({}, {"sliding_window": 7}, {"num_key_value_heads": 4}),
            # longrope's factors are a list, dynamic is refused beside a stated length.
            tuple(each for each in ropes(8) if "dynamic" not in str(each)),
        ),
    ),
)
