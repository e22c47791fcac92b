from collections.abc import Mapping
from typing import Any

import torch
from harness import TIED, Case


def _fine_tuned(model: Any, options: Mapping[str, Any]) -> None:
    """The encoder's positions are sinusoids, but those of the file count."""
    torch.nn.init.normal_(model.model.encoder.embed_positions.weight)


CASES = (
    Case(
        "whisper",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "num_hidden_layers": 3,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 24,
            "num_mel_bins": 7,
            "max_source_positions": 10,
            "max_target_positions": 30,
        },
        axes=(TIED, ({}, {"activation_function": "relu"})),
        auto="AutoModelForSpeechSeq2Seq",
        alter=_fine_tuned,
        features=(7, 20),
    ),
)
