from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from gguf_files import GgufCase
from harness import Case

_NO = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = {
    **dict.fromkeys((*_NO, "num_key_value_heads", "max_position_embeddings")),
    "d_model": 32,
    "d_ff": 40,
    "d_kv": 12,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
_FORMS = (
    {},
    {"feed_forward_proj": "gated-gelu"},
    {"feed_forward_proj": "relu"},
    {"feed_forward_proj": "gated-silu"},
)
_OWN_HEAD = {"tie_word_embeddings": False}


def _apart(model: Any, options: Mapping[str, Any]) -> None:
    """A head of its own, which transformers ties whatever the configuration says."""
    if _OWN_HEAD.items() <= options.items() and hasattr(model, "lm_head"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight", None)


_GGUF = GgufCase(
    "t5",
    settings=lambda config: {
        "context_length": 512,
        "feed_forward_length": config.d_ff,
        "decoder_block_count": config.num_decoder_layers,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "decoder_start_token_id": 0,
    },
    options={"feed_forward_proj": "gated-gelu", "relative_attention_max_distance": 128},
    kind="t5",
)

_ENCODER = replace(
    _GGUF,
    arch="t5encoder",
    settings=lambda config: {
        **_GGUF.settings(config),
        "decoder_block_count": None,
        "decoder_start_token_id": None,
    },
    options={**_GGUF.options, "auto": "T5EncoderModel"},
)

CASES = tuple(
    Case(
        name,
        _SIZES,
        axes=(
            ({}, _OWN_HEAD),
            _FORMS,
            ({}, {"num_decoder_layers": None}),
            ({}, {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
            ({}, {"auto": f"{name.upper()}EncoderModel"}),
        ),
        auto="AutoModelForSeq2SeqLM",
        alter=_apart,
        gguf=_GGUF if name == "t5" else None,
        more_gguf=(_ENCODER,) if name == "t5" else (),
    )
    for name in ("t5", "mt5", "umt5")
)

CASES += (
    Case(
        "longt5",
        _SIZES | {"local_radius": 3, "global_block_size": 4},
        axes=(
            ({"encoder_attention_type": "transient-global"}, {"encoder_attention_type": "local"}),
            ({}, _OWN_HEAD),
            _FORMS,
            ({}, {"local_radius": 1}, {"local_radius": 30}),
            ({}, {"global_block_size": 2}, {"global_block_size": 1}, {"global_block_size": 16}),
            ({}, {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
        ),
        auto="AutoModelForSeq2SeqLM",
        alter=_apart,
    ),
)

_SPARSE = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2}
CASES += (
    Case(
        "switch_transformers",
        _SIZES | {"num_experts": 3, **_SPARSE},
        axes=(
            ({}, _OWN_HEAD),
            ({}, {"expert_capacity": 3}),
            ({}, {"router_bias": True}),
            ({}, {"dense_act_fn": "gelu"}),
            ({}, {"num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 1}),
        ),
        auto="AutoModelForSeq2SeqLM",
    ),
)
