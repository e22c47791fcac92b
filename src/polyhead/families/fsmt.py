"""FSMT (Ng et al. 2019; fairseq's WMT19 models): Marian's layers, two vocabularies.

A file that has tables of positions is read with them, as they may have been trained; others have
sinusoids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from polyhead.config import EmbeddingConfig, SinusoidConfig, TransformerConfig
from polyhead.families import bart
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Rule, Tensors, under

_STATIC = "static_position_embeddings"


def read(keys: Keys) -> TransformerConfig:
    offset = keys.whole("pad_token_id") + 1
    if offset < 1:
        raise keys.refused("pad_token_id", offset - 1, "a whole number from 0")
    static = keys.flag(_STATIC, True)
    embedding = EmbeddingConfig(
        "sinusoidal" if static else "learned",
        position_offset=offset,
        sinusoid=SinusoidConfig("halves", spread=True) if static else SinusoidConfig(),
    )
    config = bart.read(keys, embedding, first=False, head_bias=False)
    if config.head is None:
        raise keys.refused("architectures", ["FSMTModel"], "FSMTForConditionalGeneration")
    source = keys.size("src_vocab_size")
    if config.head == "untied":
        return replace(config, encoder=replace(config.encoder, vocab_size=source))
    if source != config.vocab_size:
        raise keys.refused("src_vocab_size", source, f"{config.vocab_size}, as it is shared")
    return config


def write(config: TransformerConfig) -> dict[str, Any]:
    return {
        **bart.write(config),
        "src_vocab_size": config.encoder.vocab_size or config.vocab_size,
        "decoder_start_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        _STATIC: config.embedding.positions == "sinusoidal",
    }


def observed(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Whether positions are sinusoids: the file has no tables of them."""
    return {_STATIC: not any(name.endswith("embed_positions.weight") for name in tensors)}


_OUT = "decoder.output_projection"
_TIED = under("", "", dict.fromkeys(("decoder.embed_tokens", "encoder.embed_tokens", _OUT),
                                    "embedding.tokens"))  # fmt: skip


def _table(values: Mapping[str, Any]) -> Tensors:
    tied = values.get("tie_word_embeddings", False)
    tokens = _TIED if tied else (*bart.APART, Rule(_OUT, "head"))
    return Tensors((*tokens, *bart.stacks()), outside=())


FAMILIES = (
    bart.sister(
        "fsmt",
        "FSMT",
        read,
        tensors=_table,
        write=write,
        observed=observed,
        aliases={**bart.ALIASES, "vocab_size": "tgt_vocab_size"},
        harmless=bart.HARMLESS - {_STATIC} | {"langs", "decoder"},
        defaults={"hidden_act": "relu", "scale_embedding": True, "tie_word_embeddings": False},
    ),
)
