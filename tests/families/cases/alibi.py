from collections.abc import Mapping
from typing import Any

from gguf_files import GgufCase, separated
from harness import TIED, Case, ropes


def _bloom(config: Any) -> Mapping[str, Any]:
    return {
        "context_length": 64,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count_kv": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def _mpt(config: Any) -> Mapping[str, Any]:
    return {
        "context_length": config.max_seq_len,
        "feed_forward_length": 4 * config.d_model,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.clamp_kqv": config.attn_config.clip_qkv,
        "attention.max_alibi_bias": float(config.attn_config.alibi_bias_max),
    }


def _falcon(config: Any) -> Mapping[str, Any]:
    return {
        "tensor_data_layout": "jploski",
        "attention.key_length": None,
        "attention.value_length": None,
        "feed_forward_length": config.ffn_hidden_size,
        "attention.head_count_kv": config.num_kv_heads if config.new_decoder_architecture else 1,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


CASES = (
    Case(
        "bloom",
        {
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "n_layer": 2,
            "n_head": 4,
        },
        axes=(TIED, ({}, {"n_head": 12, "hidden_size": 48})),
        gguf=GgufCase("bloom", _bloom, separated("query_key_value", drop="transformer.")),
    ),
    Case(
        "mpt",
        {
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
        },
        axes=(
            TIED,
            ({}, {"n_heads": 12, "d_model": 48}),
            ({}, *({"attn_config": each} for each in ({"clip_qkv": 0.5}, {"softmax_scale": 0.5}))),
        ),
        gguf=GgufCase("mpt", _mpt, options={"attn_config": {"clip_qkv": 0.5}}, written=False),
    ),
    Case(
        "falcon",
        {"num_key_value_heads": None, "intermediate_size": None, "ffn_hidden_size": 40},
        axes=(
            TIED,
            (
                {},
                {"new_decoder_architecture": True, "num_kv_heads": 2},
                {
                    "new_decoder_architecture": True,
                    "num_kv_heads": 2,
                    "num_ln_in_parallel_attn": 1,
                },
                {"multi_query": False},
                {"parallel_attn": False},
                {"multi_query": False, "parallel_attn": False},
            ),
            (
                {},
                {"alibi": True},
                {"alibi": True, "num_attention_heads": 12, "hidden_size": 48},
                *ropes(8)[1:],
            ),
            ({}, {"bias": True}, {"activation": "silu"}),
        ),
        gguf=GgufCase(
            "falcon",
            _falcon,
            separated("query_key_value"),
            {"new_decoder_architecture": True, "num_kv_heads": 2},
        ),
        # Written out, the attention of transformers adds ALiBi twice.
        attention="sdpa",
    ),
)
