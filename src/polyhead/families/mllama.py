"""Text model of Llama 3.2 Vision (2024): Llama 3.1, with layers between that attend to a picture.

Without a picture those layers are passed by, so that ids alone go through a Llama of the other
layers, and it is saved as that. The embedding has rows for a picture's tokens behind the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.families.common.keys import Keys
from polyhead.families.common.steps import At, OneToOne
from polyhead.families.common.tables import AROUND_LAYERS, DECODER
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.llama import FAMILIES as LLAMA
from polyhead.families.llama import read as read_llama

_BETWEEN = (3, 8, 13, 18, 23, 28, 33, 38)


def read(keys: Keys) -> TransformerConfig:
    config = read_llama(keys, theta=5e5)
    between = keys.take("cross_attention_layers")
    count = len(config.layers)
    there = [*_BETWEEN] if between is None else between
    if not isinstance(there, list) or any(type(i) is not int for i in there):
        raise keys.refused("cross_attention_layers", between, "a list of layers' numbers")
    kept = count - len({i for i in there if 0 <= i < count})
    if not kept:
        raise keys.refused("cross_attention_layers", between, "a list without some layers")
    return replace(config, layers=config.layers[:kept])


@dataclass(frozen=True)
class _WithoutPictures(OneToOne):
    """The rows of ids, without those behind them."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor[: at.config.vocab_size]

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; the file's numbers of layers are not ours."""
    between = values.get("cross_attention_layers")
    there = frozenset(_BETWEEN if between is None else between)
    kept = (i for i in range(values["num_hidden_layers"]) if i not in there)
    rules = [
        Rule(
            rule.theirs.replace("{i}", str(theirs)),
            [name.replace("{i}", str(ours)) for name in rule.ours],
            *rule.steps,
        )
        for ours, theirs in enumerate(kept)
        for rule in DECODER.rules
        if rule not in AROUND_LAYERS
    ]
    numbers = "|".join(map(str, sorted(there)))
    return Tensors(
        (Rule("embed_tokens", "embedding.tokens", _WithoutPictures()), AROUND_LAYERS[1], *rules),
        dropped={rf"layers\.({numbers})\..+": "attends to a picture"} if there else {},
    )


TEXTS = (
    replace(
        LLAMA[0],
        model_type="mllama_text_model",
        read=read,
        tensors=tensors,
        defaults={
            **LLAMA[0].defaults,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "cross_attention_layers": None,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            "pad_token_id": 128_004,
        },
        harmless=frozenset(("dropout",)),
        written_as=LLAMA[0].model_type,
        gguf=None,
    ),
)
