from typing import Any

from gguf_files import GgufCase
from harness import ENCODER_HEADS, LABELS, TIED, Case


def encoder(config: Any) -> dict[str, Any]:
    """Settings of encoders."""
    return {
        "attention.causal": False,
        "pooling_type": 1,
        "attention.head_count_kv": None,
    }


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
        gguf=GgufCase("bert", encoder, kind="bert"),
    ),
)
