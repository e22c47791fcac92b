"""GPT-J (Wang & Komatsuzaki 2021) and CodeGen (Nijkamp et al. 2022): attention and network side by
side after one norm, a part of each head rotated in neighbouring pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.config import RopeConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_mha_sizes
from polyhead.families.common.steps import At, Each, Pieces, RotaryPairs
from polyhead.families.common.tensors import Rule
from polyhead.families.gpt2 import (
    ALIASES,
    DEFAULTS,
    QKV,
    SUMMARY,
    gpt_tensors,
    read_gpt,
    write_gpt,
)

SHARDS = 4
"""CodeGen's heads lie as it was trained on so many cores."""


@dataclass(frozen=True)
class ShardedRows(Pieces):
    """Cut rows that stand as ``[shards, 3, H / shards · D]``: queries, values, keys of a shard."""

    def count(self, at: At) -> int:
        return 3

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        rows = tensor.reshape(SHARDS, 3, -1, *tensor.shape[1:])
        return [rows[:, place].flatten(0, 1) for place in (0, 2, 1)]

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        q, k, v = (part.reshape(SHARDS, -1, *part.shape[1:]) for part in tensors)
        return torch.stack((q, v, k), dim=1).flatten(0, 2)


def read(keys: Keys) -> TransformerConfig:
    sizes = read_mha_sizes(keys)
    rotated = keys.whole("rotary_dim")
    if not 2 <= rotated <= sizes.head_dim or rotated % 2:
        raise keys.refused("rotary_dim", rotated, f"an even number up to {sizes.head_dim}")
    attention = sizes.attention(
        rope=RopeConfig(dim=None if rotated == sizes.head_dim else rotated),
        dropout=keys.number("attention_dropout"),
    )
    return read_gpt(
        keys,
        sizes,
        [attention] * sizes.num_layers,
        positions=None,
        parallel="one norm",
        head_bias=True,
    )


def read_codegen(keys: Keys) -> TransformerConfig:
    if (heads := keys.size("num_attention_heads")) % SHARDS:
        raise keys.refused("num_attention_heads", heads, f"a multiple of {SHARDS}")
    return read(keys)


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {**write_gpt(config), "rotary_dim": attention.rope.dim or attention.head_dim}


_REST = (
    Rule("h.{i}.attn.out_proj", "layers.{i}.attention.o_proj"),
    Rule("h.{i}.mlp.fc_in", "layers.{i}.feed_forward.up_proj"),
    Rule("h.{i}.mlp.fc_out", "layers.{i}.feed_forward.down_proj"),
)
_DEFAULTS = DEFAULTS | {
    "rotary_dim": 64,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "embd_pdrop": 0.0,
    "tie_word_embeddings": False,
}

FAMILIES = (
    Family(
        "gptj",
        "GPTJ",
        read,
        gpt_tensors(
            (
                Rule("h.{i}.attn.q_proj", QKV[0], RotaryPairs()),
                Rule("h.{i}.attn.k_proj", QKV[1], RotaryPairs()),
                Rule("h.{i}.attn.v_proj", QKV[2]),
                *_REST,
            )
        ),
        defaults=_DEFAULTS,
        write=write,
        aliases=ALIASES,
        harmless=SUMMARY | {"rotary", "scale_attn_weights"},
    ),
    Family(
        "codegen",
        "CodeGen",
        read_codegen,
        gpt_tensors(
            (
                Rule(
                    "h.{i}.attn.qkv_proj",
                    QKV,
                    ShardedRows(),
                    Each((RotaryPairs(),), (RotaryPairs(),), ()),
                ),
                *_REST,
            )
        ),
        defaults=_DEFAULTS,
        write=write,
        aliases=ALIASES,
        harmless=SUMMARY | {"rotary", "scale_attn_weights"},
    ),
)
