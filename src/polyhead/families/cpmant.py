"""CPM-Ant (OpenBMB 2022): a learned prompt in front of the text, which tokens see both ways.

The text's segment and the prompt's have vectors, and numbers that are added to scores between them.
A token sees all others of its call, later ones too, so that transformers' own cache gives other
logits than one pass: a text is computed as an encoder does it, whole and without a cache. Padding
is what the mask says; transformers takes id 0 for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    RelativeBiasConfig,
    SoftPromptConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.bert import read_encoder
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import UNLIMITED, read_head, read_rms_norm
from polyhead.families.common.steps import At, Pieces
from polyhead.families.common.tensors import Rule, Tensors, under

_CHOSEN, _SEGMENTS = 2, (0, 2)
"""The prompt, and the segments of prompt and text, that transformers' code has."""


def read(keys: Keys) -> TransformerConfig:
    heads, norm = keys.size("num_attention_heads"), read_rms_norm(keys)
    dropout = keys.number("hidden_dropout_prob")
    layer = LayerConfig(
        AttentionConfig(heads, heads, keys.size("head_dim"), dropout=dropout),
        FeedForwardConfig(keys.whole("intermediate_size"), "gelu", dropout=dropout),
        norm,
        dropout=dropout,
    )
    return read_encoder(
        keys,
        (layer,) * keys.num_layers("num_hidden_layers"),
        max_positions=UNLIMITED,
        embedding=EmbeddingConfig(
            soft_prompt=SoftPromptConfig(
                keys.size("prompt_length"),
                keys.size("prompt_types"),
                _CHOSEN,
                keys.size("segment_types"),
                _SEGMENTS,
            )
        ),
        relative_bias=RelativeBiasConfig(
            keys.whole("position_bias_num_buckets"), keys.whole("position_bias_max_distance")
        ),
        final_norm=norm,
        head=read_head(keys) and "untied",  # transformers ties nothing, whatever the key says
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    prompt, bias = config.embedding.soft_prompt, config.relative_bias
    if prompt is None or bias is None:
        raise ConfigError("this family needs a soft prompt and a bias by distance")
    return {
        "prompt_length": prompt.length,
        "prompt_types": prompt.num_prompts,
        "segment_types": prompt.num_segments,
        "position_bias_num_buckets": bias.num_buckets,
        "position_bias_max_distance": bias.max_distance,
    }


@dataclass(frozen=True)
class _BehindTokens(Pieces):
    """Cut into the rows of tokens and those behind them."""

    def count(self, at: At) -> int:
        return 2

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return tensor[: at.config.vocab_size], tensor[at.config.vocab_size :]


_TABLE = ("embedding.tokens", "embedding.soft_prompt.vectors")
TENSORS = Tensors(
    (
        Rule("input_embedding", _TABLE, _BehindTokens()),
        Rule("segment_embedding", "embedding.soft_prompt.segments"),
        Rule("position_bias.relative_attention_bias", "relative_bias.weight"),
        Rule("encoder.output_layernorm", "final_norm"),
        *under(
            "encoder.layers.{i}.",
            "layers.{i}.",
            {
                "self_att.layernorm_before_attention": "attention_norm",
                "self_att.self_attention.project_q": "attention.q_proj",
                "self_att.self_attention.project_k": "attention.k_proj",
                "self_att.self_attention.project_v": "attention.v_proj",
                "self_att.self_attention.attention_out": "attention.o_proj",
                "ffn.layernorm_before_ffn": "feed_forward_norm",
                "ffn.ffn.w_in.w_0": "feed_forward.gate_proj",
                "ffn.ffn.w_in.w_1": "feed_forward.up_proj",
                "ffn.ffn.w_out": "feed_forward.down_proj",
            },
        ),
    ),
    prefix="cpmant.",
)

FAMILIES = (
    Family(
        "cpmant",
        "CpmAnt",
        read,
        TENSORS,
        defaults={
            "head_dim": 128,
            "hidden_dropout_prob": 0.0,
            "position_bias_max_distance": 2048,
            "position_bias_num_buckets": 512,
            "prompt_length": 32,
            "prompt_types": 32,
            "rms_norm_eps": 1e-6,
            "segment_types": 32,
            "tie_word_embeddings": True,
        },
        write=write,
        aliases={
            "head_dim": "dim_head",
            "hidden_dropout_prob": "dropout_p",
            "intermediate_size": "dim_ff",
            "rms_norm_eps": "eps",
        },
        harmless=frozenset(("init_std",)),
    ),
)
