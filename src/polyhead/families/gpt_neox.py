"""GPT-NeoX (Black et al. 2022; Pythia): attention and network side by side after a norm each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyhead.config import EmbeddingConfig, FeedForwardConfig, LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_activation,
    read_decoder,
    read_layer_norm,
    read_mha_sizes,
    read_network,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVPerGroup, QKVRows
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.gpt2 import QKV

FUSED = (
    Rule("layers.{i}.attention.query_key_value", QKV, QKVPerGroup()),
    Rule("layers.{i}.attention.dense", "layers.{i}.attention.o_proj"),
    Rule("layers.{i}.mlp.dense_h_to_4h", "layers.{i}.feed_forward.up_proj"),
    Rule("layers.{i}.mlp.dense_4h_to_h", "layers.{i}.feed_forward.down_proj"),
    Rule("layers.{i}.input_layernorm", "layers.{i}.attention_norm"),
    Rule("layers.{i}.post_attention_layernorm", "layers.{i}.feed_forward_norm"),
)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, partial_rotary_factor=0.25)
    biased, dropout = keys.flag("attention_bias"), keys.number("hidden_dropout_prob")
    layer = LayerConfig(
        sizes.attention(
            qkv_bias=biased,
            out_bias=biased,
            rope=rope,
            dropout=keys.number("attention_dropout"),
        ),
        read_network(keys, gated=False, bias=True),
        norm,
        parallel="two norms" if keys.flag("use_parallel_residual") else None,
        dropout=dropout,
    )
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
        embedding=EmbeddingConfig(dropout=dropout),
    )


def read_japanese(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, partial_rotary_factor=1.0)
    multiple = keys.whole("intermediate_multiple_size")
    attention = sizes.attention(rope=rope, dropout=keys.number("attention_dropout"))
    layer = LayerConfig(
        attention,
        FeedForwardConfig(sizes.embed_dim * multiple, read_activation(keys), gated=False),
        norm,
        dropout=keys.number("hidden_dropout_prob"),
    )
    last = replace(layer, attention=replace(attention, out_bias=True))
    return read_decoder(
        keys,
        [layer] * (sizes.num_layers - 1) + [last],
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def write_japanese(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    return {"intermediate_multiple_size": network.hidden_dim // config.embed_dim}


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {
        "use_parallel_residual": config.layers[0].parallel is not None,
        # The family's own default is a quarter.
        "rotary_pct": (attention.rope.dim or attention.head_dim) / attention.head_dim,
    }


_TENSORS = Tensors(
    (
        Rule("embed_in", "embedding.tokens"),
        Rule("final_layer_norm", "final_norm"),
        *FUSED,
    ),
    prefix="gpt_neox.",
    outside=(Rule("embed_out", "head"), Rule("lm_head", "head")),
    dropped={
        r"layers\.\d+\.attention\.(bias|masked_bias)": "the causal mask",
        r"layers\.\d+\.attention\.rotary_emb\.inv_freq": "follows from the configuration",
    },
)
_OLDER_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}

FAMILIES = (
    Family(
        "gpt_neox",
        "GPTNeoX",
        read,
        _TENSORS,
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write,
        aliases=_OLDER_NAMES | {"hidden_dropout_prob": "hidden_dropout"},
        harmless=frozenset(("is_decoder", "attention_probs_dropout_prob")),
        gguf=Gguf(
            "gptneox",
            settings={
                "use_parallel_residual": "use_parallel_residual",
                "attention.head_count_kv": None,
            },
            steps={"layers.{i}.attention.query_key_value": (QKVRows(),)},
        ),
    ),
    Family(
        "gpt_neox_japanese",
        "GPTNeoXJapanese",
        read_japanese,
        replace(_TENSORS, prefix="gpt_neox_japanese.").extended(
            Rule("layers.{i}.attention.dense_bias", "layers.{i}.attention.o_proj.bias")
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.1,
            "hidden_dropout_prob": 0.0,
            "intermediate_multiple_size": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 31996,
            "eos_token_id": 31999,
            "pad_token_id": None,
        },
        write=write_japanese,
        aliases=_OLDER_NAMES | {"hidden_dropout_prob": "hidden_dropout"},
        harmless=frozenset(("is_decoder",)),
    ),
)
