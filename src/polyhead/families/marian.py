"""Marian (Junczys-Dowmunt et al. 2018; the OPUS-MT models): norms last, sinusoids, often a
vocabulary for either language.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families import bart
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Tensors

_APART = "share_encoder_decoder_embeddings"


def read(keys: Keys) -> TransformerConfig:
    config = bart.read(keys, bart.MARIANS, first=False)
    target = keys.whole("decoder_vocab_size", config.vocab_size)
    if keys.flag(_APART):
        if target != config.vocab_size:
            raise keys.refused(
                "decoder_vocab_size", target, f"{config.vocab_size}, as it is shared"
            )
        return config
    encoder = replace(config.encoder, own_tokens=True, vocab_size=config.vocab_size)
    return replace(config, vocab_size=target, encoder=encoder)


def write(config: TransformerConfig) -> dict[str, Any]:
    source = config.encoder.vocab_size
    return {
        **bart.write(config),
        "vocab_size": source or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        _APART: source is None,
        "decoder_start_token_id": config.pad_token_id,
    }


def _table(values: Mapping[str, Any]) -> Tensors:
    shared = values.get("tie_word_embeddings", True) and values.get(_APART, True)
    return bart.table({"tie_word_embeddings": shared}, dropped=bart.SINUSOIDS)


FAMILIES = (
    bart.sister(
        "marian",
        "Marian",
        read,
        tensors=_table,
        write=write,
        with_head="MTModel",
        defaults={
            _APART: True,
            "decoder_vocab_size": None,
            "pad_token_id": 58_100,
            "bos_token_id": None,
            "eos_token_id": 0,
        },
    ),
)
