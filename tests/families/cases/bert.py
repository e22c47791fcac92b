from harness import ENCODER_HEADS, LABELS, TIED, Case

CASES = (
    Case(
        "bert",
        {"num_key_value_heads": None},
        auto="AutoModel",
        axes=(
            (*ENCODER_HEADS, {"auto": "AutoModelForPreTraining"}),
            LABELS,
            TIED,
            ({}, {"hidden_act": "relu"}),
            ({}, {"type_vocab_size": 1}),
        ),
    ),
)
