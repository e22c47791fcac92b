"""GPT-BigCode (SantaCoder, StarCoder, 2023): GPT-2 with one key and value for all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import InitialConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_sizes
from polyhead.families.common.steps import QKVPerGroup
from polyhead.families.common.tensors import Rule
from polyhead.families.gpt2 import (
    ALIASES,
    DEFAULTS,
    NO_CROSS_ATTENTION,
    QKV,
    SUMMARY,
    gpt_tensors,
    read_gpt,
    write_gpt,
)


def read(keys: Keys) -> TransformerConfig:
    sizes = read_sizes(keys, own_head_dim=False)
    wanted = 1 if keys.flag("multi_query") else sizes.num_heads
    if keys.has("num_key_value_heads") and sizes.num_kv_heads != wanted:
        raise keys.refused(
            "num_key_value_heads", sizes.num_kv_heads, f"{wanted}, as multi_query says"
        )
    sizes = replace(sizes, num_kv_heads=wanted)
    attention = sizes.attention(
        qkv_bias=True,
        out_bias=True,
        scale=None if keys.flag("scale_attn_weights") else 1.0,
        dropout=keys.number("attention_dropout"),
    )
    return read_gpt(keys, sizes, [attention] * sizes.num_layers)


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {
        **write_gpt(config),
        "multi_query": attention.num_kv_heads == 1,
        "scale_attn_weights": attention.scale is None,
    }


FAMILIES = (
    Family(
        "gpt_bigcode",
        "GPTBigCode",
        read,
        gpt_tensors(
            (
                Rule("h.{i}.attn.c_attn", QKV, QKVPerGroup()),
                Rule("h.{i}.attn.c_proj", "layers.{i}.attention.o_proj"),
                Rule("h.{i}.mlp.c_fc", "layers.{i}.feed_forward.up_proj"),
                Rule("h.{i}.mlp.c_proj", "layers.{i}.feed_forward.down_proj"),
            )
        ),
        initial=InitialConfig("residual"),
        defaults=DEFAULTS
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "multi_query": True,
            "scale_attn_weights": True,
        },
        write=write,
        aliases=ALIASES,
        not_supported=NO_CROSS_ATTENTION,
        harmless=SUMMARY
        | {
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "inference_runner",
            "max_batch_size",
            "max_sequence_length",
            "pad_key_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
        },
        gguf=Gguf("starcoder"),
    ),
)
