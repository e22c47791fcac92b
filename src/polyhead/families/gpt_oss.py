"""gpt-oss (OpenAI 2025): sinks, windows in every other layer, experts with clamped SwiGLU.

Files hold the experts of a layer stacked, gate and up columns in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS as GGUF_EXPERTS
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope, write_plain_rope
from polyhead.families.common.steps import Alternating, PerExpert, Transposed
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NORMS, SINKS
from polyhead.families.common.tensors import Rule, Tensors

_ALPHA = 1.702
_ROPE = RopeConfig(
    150_000.0,
    "yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_positions=4096,
)
"""Where a file does not say."""
_EXPERT = "layers.{i}.feed_forward.experts.{j}."


def _pair(leaf: str) -> tuple[str, str]:
    return _EXPERT + "gate_proj." + leaf, _EXPERT + "up_proj." + leaf


EXPERTS = (
    Rule("layers.{i}.mlp.router", "layers.{i}.feed_forward.router"),
    Rule(
        "layers.{i}.mlp.experts.gate_up_proj",
        _pair("weight"),
        PerExpert(),
        Transposed(),
        Alternating(),
    ),
    Rule("layers.{i}.mlp.experts.gate_up_proj_bias", _pair("bias"), PerExpert(), Alternating()),
    Rule(
        "layers.{i}.mlp.experts.down_proj", _EXPERT + "down_proj.weight", PerExpert(), Transposed()
    ),
    Rule("layers.{i}.mlp.experts.down_proj_bias", _EXPERT + "down_proj.bias", PerExpert()),
)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=_ROPE.theta, unstated=_ROPE)
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        rope=rope,
        sinks=True,
        dropout=keys.number("attention_dropout"),
    )
    keys.expect("hidden_act", "silu")  # the experts compute x · sigmoid(alpha x) whatever it says
    keys.expect("swiglu_alpha", _ALPHA)
    expert = FeedForwardConfig(
        keys.whole("intermediate_size"),
        activation="quick_gelu",
        bias=True,
        clamp=keys.number("swiglu_limit"),
        up_offset=1.0,
    )
    mixture = MixtureConfig(
        expert,
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        router_bias=True,
        normalize=True,
    )
    default = [FULL if i % 2 else SLIDING for i in range(sizes.num_layers)]
    kinds = read_layer_types(keys, sizes.num_layers, default)
    of_kind = {FULL: attention, SLIDING: replace(attention, window=keys.whole("sliding_window"))}
    return read_decoder(
        keys,
        [LayerConfig(of_kind[kind], mixture, norm) for kind in kinds],
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].feed_forward
    windows = [layer.attention.visible_window for layer in config.layers]
    return {
        **write_plain_rope(config.layers[0].attention.rope),
        "hidden_act": "silu",
        "num_local_experts": mixture.num_experts,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": mixture.expert.clamp,
        "sliding_window": next((each for each in windows if each is not None), 128),
    }


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The format does not say that yarn's limits are not rounded, as they are in no file here."""
    if (scaling := values.get("rope_scaling")) is None:
        return {"rope_scaling": {"rope_type": "default"}}
    return {"rope_scaling": {**scaling, "truncate": False}}


FAMILIES = (
    Family(
        "gpt_oss",
        "GptOss",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                *ATTENTION,
                SINKS,
                *EXPERTS,
            )
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "hidden_act": "silu",
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "sliding_window": 128,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        write=write,
        harmless=frozenset(("router_aux_loss_coef", "experts_per_token", "initial_context_length")),
        gguf=Gguf(
            "gpt-oss",
            settings={
                "expert_count": "num_local_experts",
                "expert_feed_forward_length": "intermediate_size",
            },
            names={"layers.{i}.self_attn.sinks": "blk.{i}.attn_sinks.weight"},
            rules=GGUF_EXPERTS,
            values=_from_gguf,
        ),
    ),
)
