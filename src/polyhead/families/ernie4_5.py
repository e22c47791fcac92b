"""ERNIE 4.5 (Baidu 2025): Llama with rotary pairs side by side, and its mixture of experts.

A softmax scores the experts; a bias helps to choose, and the weights of those chosen sum to 1. The
layers between a first and a last one have experts, or every so many of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import FeedForwardConfig, MixtureConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import DRAFTS, EXPERTS
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tables import PAIRED
from polyhead.families.common.tensors import Rule


def read(keys: Keys, *, mixed: bool = False, **rotary: Any) -> TransformerConfig:
    biased = keys.flag("use_bias")
    plain = Plain(keys, network=read_network(keys, bias=biased), theta=5e5, **rotary)
    attention = replace(plain.attention(), qkv_bias=biased, out_bias=biased)
    if not mixed:
        return plain.decoder([plain.layer(attention)])
    mixture, sparse = _read_mixture(keys, plain.network), _sparse(keys, plain.sizes.num_layers)
    networks = [mixture if each else plain.network for each in sparse]
    return plain.decoder([plain.layer(attention, each) for each in networks], head_bias=biased)


def _read_mixture(keys: Keys, dense: FeedForwardConfig) -> MixtureConfig:
    keys.expect("moe_norm_min", 1e-12)
    keys.expect("moe_gate", "topk")
    width, shared = keys.whole("moe_intermediate_size"), keys.whole("moe_num_shared_experts")
    return MixtureConfig(
        FeedForwardConfig(width, dense.activation),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        shared=replace(dense, hidden_dim=shared * width) if shared else None,
        choice_bias=True,
        normalize=True,
    )


def _sparse(keys: Keys, count: int) -> list[bool]:
    """Whether each layer has experts."""
    first, last = keys.whole("moe_layer_start_index"), keys.whole("moe_layer_end_index")
    every = keys.size("moe_layer_interval")
    last = count - 1 if last == -1 else last
    return [first <= i <= last and (i + 1) % every == 0 for i in range(count)]


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"use_bias": attention.qkv_bias}


def write_mixed(config: TransformerConfig) -> dict[str, Any]:
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    sparse = [i for i, each in enumerate(networks) if isinstance(each, MixtureConfig)]
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    if not sparse:
        raise ConfigError("this family needs a layer with a mixture of experts: got none")
    mixture = networks[sparse[0]]
    shared, width = mixture.shared, mixture.expert.hidden_dim
    values = {
        **write(config),
        "moe_num_experts": mixture.num_experts,
        "moe_k": mixture.experts_per_token,
        "moe_intermediate_size": width,
        "moe_num_shared_experts": 0 if shared is None else shared.hidden_dim // width,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }
    return values if dense is None else values | {"intermediate_size": dense.hidden_dim}


_STATICS = "layers.{i}.mlp.moe_statics.e_score_correction_bias"
_MIXED = replace(
    PAIRED.extended(Rule(_STATICS, "layers.{i}.feed_forward.choice_bias", Shaped((0,))), *EXPERTS),
    dropped={**PAIRED.dropped, r"mtp_.+": DRAFTS},
)
_DEFAULTS: Mapping[str, Any] = {
    **{
        key: value
        for key, value in PLAIN_DEFAULTS.items()
        if key not in ("attention_bias", "attention_dropout")
    },
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
    "pad_token_id": 0,
}

FAMILIES = (
    Family(
        "ernie4_5",
        "Ernie4_5",
        read,
        PAIRED,
        defaults={**_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
        write=write,
        gguf=Gguf("ernie4_5"),
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        partial(read, mixed=True),
        _MIXED,
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 6,
            "num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        write=write_mixed,
        gguf=Gguf(
            "ernie4_5-moe",
            settings={
                "expert_shared_count": "moe_num_shared_experts",
                "expert_shared_feed_forward_length": None,
                "expert_gating_func": None,
                "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
            },
            names={_STATICS: "blk.{i}.exp_probs_b.bias"},
        ),
        harmless=frozenset(
            ("router_aux_loss_coef", "moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers")
        ),
    ),
)
