"""MPT (MosaicML, 2023): ALiBi, no biases anywhere, norms without bias.

transformers' class computes this whatever ``attn_config`` says of prefixes, norms of queries and
keys or multi-query heads; the model's own code does not. So those are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    ALiBiConfig,
    FeedForwardConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.families.common.config_json import HARMLESS
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_layer_norm, read_mha_sizes
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.gpt2 import QKV

_FLAT = {"attention.clamp_kqv": "clip_qkv", "attention.max_alibi_bias": "alibi_bias_max"}
"""What GGUF files have of ``attn_config``."""


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_mha_sizes(keys), read_layer_norm(keys, bias=False)
    keys.expect("no_bias", True)
    keys.expect("expansion_ratio", 4)
    keys.expect("norm_type", "low_precision_layernorm", "layernorm")
    flat = {key: keys.take(key) for key in _FLAT.values() if keys.has(key)}
    stated = keys.take("attn_config", None) or {}
    if not isinstance(stated, Mapping):
        raise keys.refused("attn_config", stated, "an object")
    inner = Keys({**flat, **stated}, f"{keys.where}: attn_config")
    inner.expect("attn_type", "multihead_attention")
    inner.expect("alibi", True)
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        inner.expect(key, False)
    dropout = inner.number("attn_pdrop", 0.0)
    attention = sizes.attention(
        alibi=ALiBiConfig(max_bias=inner.number("alibi_bias_max", 8.0)),
        qkv_clip=inner.number("clip_qkv", None) or None,
        scale=inner.number("softmax_scale", None),
        dropout=dropout,
    )
    inner.finish(HARMLESS | {"attn_impl", "model_type", "is_encoder_decoder"})
    layer = LayerConfig(
        attention,
        FeedForwardConfig(4 * sizes.embed_dim, "gelu", gated=False),
        norm,
        dropout=dropout,
    )
    return read_decoder(
        keys, [layer] * sizes.num_layers, max_positions=sizes.max_positions, norm=norm
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(attention.alibi.max_bias),
            "clip_qkv": attention.qkv_clip,
            "softmax_scale": attention.scale,
            "attn_pdrop": attention.dropout or 0,
        }
    }


FAMILIES = (
    Family(
        "mpt",
        "Mpt",
        read,
        Tensors(
            (
                Rule("wte", "embedding.tokens"),
                Rule("norm_f", "final_norm"),
                Rule("blocks.{i}.attn.Wqkv", QKV, QKVRows()),
                *under(
                    "blocks.{i}.",
                    "layers.{i}.",
                    {
                        "attn.out_proj": "attention.o_proj",
                        "ffn.up_proj": "feed_forward.up_proj",
                        "ffn.down_proj": "feed_forward.down_proj",
                        "norm_1": "attention_norm",
                        "norm_2": "feed_forward_norm",
                    },
                ),
            ),
            prefix="transformer.",
        ),
        defaults={
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        write=write,
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        not_supported={"logit_scale": "transformers' class does not scale logits either"},
        harmless=frozenset(
            (
                "emb_pdrop",
                "resid_pdrop",
                "embedding_fraction",
                "init_config",
                "init_device",
                "learned_pos_emb",  # the model's own code ignores it with ALiBi
                "tokenizer_name",
                "verbose",
            )
        ),
        gguf=Gguf(
            "mpt",
            settings={**_FLAT, "attention.head_count_kv": None, "feed_forward_length": None},
        ),
    ),
)
