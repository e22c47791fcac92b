from harness import Case

CASES = (
    Case(
        "bert",
        {"num_key_value_heads": None},
        auto="AutoModel",
        axes=(({}, {"hidden_act": "relu"}), ({}, {"type_vocab_size": 1}, {"type_vocab_size": 0})),
    ),
)
