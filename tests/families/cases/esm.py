from collections.abc import Mapping
from typing import Any

from harness import LABELS, TIED, Case, heads

_ROTARY = {"position_embedding_type": "rotary"}


def _rounded(model: Any, options: Mapping[str, Any]) -> None:
    """Rotary frequencies as large ESM-2 files hold them, where the options give a theta."""
    if "rope_theta" in options:
        frequencies = getattr(model, "esm", model).rotary_embeddings.inv_freq
        frequencies.copy_(frequencies.half())


CASES = (
    Case(
        "esm",
        {"num_key_value_heads": None, "pad_token_id": 1, "mask_token_id": 32},
        auto="AutoModel",
        axes=(
            heads("MaskedLM", "SequenceClassification", "TokenClassification"),
            LABELS,
            TIED,
            ({}, _ROTARY, {**_ROTARY, "rope_theta": 500.0}),
            ({}, {"emb_layer_norm_before": True}),
            ({}, {"token_dropout": True}, {"token_dropout": True, "mask_token_id": 20}),
        ),
        alter=_rounded,
    ),
)
