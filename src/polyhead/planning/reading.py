"""What is to be planned, as a ``TransformerConfig``: read by the families' own reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families import read_config as read_family

_NESTED = ("text_config", "llm_config", "language_config")


def read_config(values: Mapping[str, Any], where: str) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The configuration of a config.json, and a note if parts of the model are not in it.

    Args:
        values: Its object; a model of several kinds of input keeps the text model's in
            ``text_config``.

    Raises:
        ConfigError: The family is not supported, or a key is missing, impossible, or not
            understood; always by name.
    """
    for key in _NESTED:
        nested = values.get(key)
        if isinstance(nested, Mapping):
            outer = {k: v for k, v in values.items() if k in ("tie_word_embeddings", "vocab_size")}
            text = {"model_type": values.get("model_type")} | outer
            text |= {k: v for k, v in nested.items() if v is not None}
            return read_family(text, where), (f"only the text model ({key}) is counted",)
    return read_family(values, where), ()
