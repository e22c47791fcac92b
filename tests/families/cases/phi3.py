from harness import TIED, Case, ropes

CASES = (
    Case(
        "phi3",
        {"original_max_position_embeddings": 16},
        axes=(
            TIED,
            ({}, {"sliding_window": 7}, {"num_key_value_heads": 4}),
            # transformers takes no other scaling for this family.
            tuple(each for each in ropes(8) if not each or "longrope" in str(each)),
        ),
    ),
)
