"""Llama 4 (text, 2025): three of four layers rotate and see chunks, the fourth sees everything
without rotation; mixtures whose weights multiply what the experts read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.config.attention import QueryTemperatureConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import EXPERTS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import PerExpert, RotaryPairs, Rows, Transposed
from polyhead.families.common.tables import AROUND_LAYERS, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under

CHUNKED, FULL = "chunked_attention", "full_attention"
_EXPERTS_OF_MAVERICK = 128
_NETWORK = "layers.{i}.feed_forward."
_EXPERT = _NETWORK + "experts.{j}."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=5e5)
    biased = keys.flag("attention_bias")
    attention = sizes.attention(
        qkv_bias=biased, out_bias=biased, dropout=keys.number("attention_dropout")
    )
    qk_norm = None
    if keys.flag("use_qk_norm"):
        unweighted = NormConfig("rmsnorm", eps=norm.eps, weight=False)
        qk_norm = QKNormConfig(unweighted, place="after_rope")
    tuned, every, scale = (
        keys.flag("attn_temperature_tuning"),
        keys.whole("floor_scale"),
        keys.number("attn_scale"),
    )
    temperature = QueryTemperatureConfig(scale, every, offset=1) if tuned else None
    rotated, chunk = _rotated(keys, sizes.num_layers), keys.whole("attention_chunk_size", None)
    default = [CHUNKED if each else FULL for each in rotated]
    kinds = read_layer_types(keys, sizes.num_layers, default, (CHUNKED, FULL))
    if CHUNKED in kinds and chunk is None:
        raise keys.refused(
            "attention_chunk_size", None, "a number of tokens, as layers have chunks"
        )
    dense = replace(read_network(keys), hidden_dim=keys.whole("intermediate_size_mlp"))
    expert = read_network(keys)
    mixture = MixtureConfig(
        expert,
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        shared=expert,
        scoring="sigmoid",
        weighs="input",
    )
    sparse = _sparse(keys, sizes.num_layers)
    layers = [
        LayerConfig(
            replace(
                attention,
                rope=rope if turned else None,
                qk_norm=qk_norm if turned else None,
                query_temperature=None if turned else temperature,
                chunk=chunk if kind == CHUNKED else None,
            ),
            mixture if i in sparse else dense,
            norm,
        )
        for i, (turned, kind) in enumerate(zip(rotated, kinds, strict=True))
    ]
    return read_decoder(keys, layers, max_positions=reach(rope, sizes.max_positions), norm=norm)


def _rotated(keys: Keys, count: int) -> list[bool]:
    """Whether each layer rotates (``no_rope_layers`` says 1 where it does)."""
    interval = keys.whole("no_rope_layer_interval")
    if interval < 1:
        raise keys.refused("no_rope_layer_interval", interval, "at least 1 layer")
    flags = keys.take("no_rope_layers", None) or [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(flags, list) or len(flags) != count or any(i not in (0, 1) for i in flags):
        raise keys.refused("no_rope_layers", flags, f"{count} of 0 and 1")
    return [bool(each) for each in flags]


def _sparse(keys: Keys, count: int) -> frozenset[int]:
    step, named = keys.whole("interleave_moe_layer_step"), keys.take("moe_layers", None)
    if named is None:
        if step < 1:
            raise keys.refused("interleave_moe_layer_step", step, "at least 1 layer")
        named = list(range(step - 1, count, step))
    if not isinstance(named, list) or any(type(i) is not int for i in named):
        raise keys.refused("moe_layers", named, "a list of layers' numbers")
    return frozenset(named)


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    mixture = next(each for each in networks if isinstance(each, MixtureConfig))
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    tuned = next((each.query_temperature for each in attentions if each.query_temperature), None)
    return {
        "intermediate_size": mixture.expert.hidden_dim,
        "intermediate_size_mlp": mixture.expert.hidden_dim if dense is None else dense.hidden_dim,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_layers": [i for i, each in enumerate(networks) if isinstance(each, MixtureConfig)],
        "no_rope_layers": [int(each.rope is not None) for each in attentions],
        "layer_types": [FULL if each.chunk is None else CHUNKED for each in attentions],
        "attention_chunk_size": next((each.chunk for each in attentions if each.chunk), 8192),
        "use_qk_norm": any(each.qk_norm is not None for each in attentions),
        "attn_temperature_tuning": tuned is not None,
        **({} if tuned is None else {"floor_scale": tuned.every, "attn_scale": tuned.scale}),
    }


def _turned(name: str) -> Rule:
    return Rule(
        f"layers.{{i}}.self_attn.{name}_proj", f"layers.{{i}}.attention.{name}_proj", RotaryPairs()
    )


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The format does not say that the largest model alone normalizes no queries and keys."""
    found: dict[str, Any] = {"use_qk_norm": values.get("num_local_experts") != _EXPERTS_OF_MAVERICK}
    if values.get(".window") == 0:  # then every layer rotates and sees everything
        count = values["num_hidden_layers"]
        found |= {"no_rope_layers": [1] * count, "layer_types": [FULL] * count}
    return found


FAMILIES = (
    Family(
        "llama4_text",
        "Llama4",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                _turned("q"),
                _turned("k"),
                *under(
                    "layers.{i}.self_attn.",
                    "layers.{i}.attention.",
                    {"v_proj": "v_proj", "o_proj": "o_proj"},
                ),
                *under("layers.{i}.feed_forward.", _NETWORK, {name: name for name in _PROJECTIONS}),
                *under(
                    "layers.{i}.feed_forward.shared_expert.",
                    _NETWORK + "shared.",
                    {name: name for name in _PROJECTIONS},
                ),
                Rule("layers.{i}.feed_forward.router", _NETWORK + "router"),
                Rule(
                    "layers.{i}.feed_forward.experts.gate_up_proj",
                    (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
                    PerExpert(),
                    Transposed(),
                    Rows(),
                ),
                Rule(
                    "layers.{i}.feed_forward.experts.down_proj",
                    _EXPERT + "down_proj.weight",
                    PerExpert(),
                    Transposed(),
                ),
            )
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write,
        bare="TextModel",
        harmless=frozenset(("router_aux_loss_coef", "router_jitter_noise", "for_llm_compressor")),
        gguf=Gguf(
            "llama4",
            settings={
                "expert_count": "num_local_experts",
                "feed_forward_length": "intermediate_size_mlp",
                "expert_feed_forward_length": "intermediate_size",
                "interleave_moe_layer_step": "interleave_moe_layer_step",
                "attention.sliding_window": ".window",
            },
            rules=EXPERTS,
            values=_from_gguf,
        ),
    ),
)
