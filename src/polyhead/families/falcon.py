"""Falcon (Almazrouei et al. 2023).

7B has one key for all heads and one norm; 40B and 180B have groups, and a norm each for attention
and network; the older RW is sequential, with ALiBi.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from polyhead.config import ALiBiConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.families.bloom import AROUND_LAYERS, LAYERS
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_activation,
    read_decoder,
    read_layer_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tensors import Rule, Tensors

_TWO_NORMS = (
    Rule("h.{i}.ln_attn", "layers.{i}.attention_norm"),
    Rule("h.{i}.ln_mlp", "layers.{i}.feed_forward_norm"),
)
_ONE = Tensors((*AROUND_LAYERS, *LAYERS), prefix="transformer.")
_TWO = _ONE.extended(*_TWO_NORMS)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys, own_head_dim=False, max_positions=2048), read_layer_norm(keys)
    parallel, num_kv_heads = _read_form(keys, sizes.num_heads, sizes.num_kv_heads)
    sizes = replace(sizes, num_kv_heads=num_kv_heads)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    # Scores and bias are scaled together, and the bias is rounded whatever the model's dtype.
    alibi = ALiBiConfig(scale=1 / math.sqrt(sizes.head_dim), rounded=True)
    biased, bias_by_distance = keys.flag("bias"), keys.flag("alibi")
    layer = LayerConfig(
        sizes.attention(
            qkv_bias=biased,
            out_bias=biased,
            rope=None if bias_by_distance else rope,
            alibi=alibi if bias_by_distance else None,
            dropout=keys.number("attention_dropout"),
        ),
        FeedForwardConfig(
            keys.whole("intermediate_size", 4 * sizes.embed_dim),
            read_activation(keys),
            gated=False,
            bias=biased,
        ),
        norm,
        parallel=parallel,
        dropout=keys.number("hidden_dropout_prob"),
    )
    stated = sizes.max_positions
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=stated if bias_by_distance else reach(rope, stated),
        norm=norm,
    )


def _read_form(
    keys: Keys, heads: int, num_kv_heads: int
) -> tuple[Literal["one norm", "two norms"] | None, int]:
    """Which norms there are, and how many heads of keys."""
    new, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn")
    norms = keys.whole("num_ln_in_parallel_attn", None)
    multi = keys.flag("multi_query")
    if new and not parallel:
        raise keys.refused("parallel_attn", False, "true with new_decoder_architecture")
    if norms not in ((None, 1, 2) if new else (None, 1)):
        raise keys.refused("num_ln_in_parallel_attn", norms, "1, or 2 in the new architecture")
    if new:
        return "one norm" if norms == 1 else "two norms", num_kv_heads
    if not multi and num_kv_heads != heads:
        raise keys.refused("num_key_value_heads", num_kv_heads, f"{heads} without multi_query")
    return "one norm" if parallel else None, 1 if multi else heads


def write(config: TransformerConfig) -> dict[str, Any]:
    layer = config.layers[0]
    attention: Any = layer.attention
    heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
    new = layer.parallel == "two norms" or num_kv_heads not in (1, heads)
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if layer.parallel == "two norms" else 1) if new else None,
        "parallel_attn": layer.parallel is not None,
        "multi_query": not new and num_kv_heads == 1,
        "alibi": attention.alibi is not None,
        "bias": attention.qkv_bias,
    }


def gguf_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """GGUF files do not state the architecture's variant."""
    new = values["num_key_value_heads"] > 1
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": values["num_ln_in_parallel_attn"] if new else None,
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    new = values.get("new_decoder_architecture", False)
    return _TWO if new and values.get("num_ln_in_parallel_attn") != 1 else _ONE


FAMILIES = (
    Family(
        "falcon",
        "Falcon",
        read,
        tensors,
        defaults={
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "hidden_act": "gelu",
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "tie_word_embeddings": True,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "pad_token_id": None,
        },
        write=write,
        harmless=frozenset(("ff_factor",)),  # follows from ffn_hidden_size
        aliases={
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_dropout_prob": "hidden_dropout",
        },
        not_supported={
            "apply_residual_connection_post_layernorm": "the residual stream begins after the norm",
        },
        gguf=Gguf(
            "falcon",
            steps={"h.{i}.self_attention.query_key_value": (QKVRows(),)},
            values=gguf_values,
        ),
    ),
)
