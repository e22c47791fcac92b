"""LFM2 (Liquid AI, 2025), dense and with experts: short convolutions, and some layers of attention.

Networks of the dense models may be given before their size is adjusted, as older files do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    ShortConvolutionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import SIGMOID, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.plain import Plain
from polyhead.families.common.reading import FULL, read_layer_types
from polyhead.families.common.steps import PerExpert, Rows, Shaped
from polyhead.families.common.tables import ATTENTION
from polyhead.families.common.tensors import Rule, Tensors, under

_CONV = "conv"
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 65_536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OF_TRAINING = frozenset(
    (
        "block_mlp_init_scale",
        "block_out_init_scale",
        "block_use_xavier_init",
        "conv_use_xavier_init",
        "block_norm_eps",
        "theta",
    )
)


def read(keys: Keys, *, experts: bool) -> TransformerConfig:
    """The configuration that the keys mean.

    Args:
        keys: Keys of config.json.
        experts: Whether all but the first layers have a mixture of experts.
    """
    norm = NormConfig("rmsnorm", eps=keys.number("norm_eps"))
    width = keys.size("hidden_size")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        keys.expect(key, width, None)
    for key in ("block_use_swiglu", "use_pos_enc"):
        keys.expect(key, True)
    keys.expect("num_heads", keys.size("num_attention_heads"), None)
    size = keys.size("intermediate_size")
    size = size if experts else _adjusted(keys, keys.size("block_ff_dim", size))
    network = FeedForwardConfig(size, "silu")
    plain = Plain(keys, norm=norm, network=network, theta=1_000_000.0)
    attention = plain.sizes.attention(rope=plain.rope, qk_norm=QKNormConfig(norm))
    convolution = ShortConvolutionConfig(
        width=width, conv_kernel=keys.whole("conv_L_cache"), bias=keys.flag("conv_bias")
    )
    count = plain.sizes.num_layers
    networks: list[FeedForwardConfig | MixtureConfig] = [network] * count
    if experts:
        dense, mixture = keys.whole("num_dense_layers"), _read_mixture(keys)
        networks = [network if i < dense else mixture for i in range(count)]
    full = keys.wholes("full_attn_idxs") if keys.has("full_attn_idxs") else [*range(count)]
    default = [FULL if i in full else _CONV for i in range(count)]
    kinds = read_layer_types(keys, count, default, (FULL, _CONV))
    return plain.decoder(
        [
            plain.layer(attention if kind == FULL else convolution, each)
            for kind, each in zip(kinds, networks, strict=True)
        ]
    )


def _adjusted(keys: Keys, size: int) -> int:
    """The hidden size of a dense network, of which files may say 3/2."""
    adjusts = keys.flag("block_auto_adjust_ff_dim")
    factor, multiple = keys.number("block_ffn_dim_multiplier", None), keys.size("block_multiple_of")
    if not adjusts:
        return size
    size = int(2 * size / 3)
    if factor is not None:
        size = -(-int(factor * size) // multiple) * multiple
    if size < 1:
        raise keys.refused("block_ffn_dim_multiplier", factor, "a number that leaves features")
    return size


def _read_mixture(keys: Keys) -> MixtureConfig:
    return MixtureConfig(
        FeedForwardConfig(keys.size("moe_intermediate_size"), "silu"),
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        scoring="sigmoid",
        choice_bias=keys.flag("use_expert_bias"),
        normalize=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor"),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    found = [layer.attention for layer in config.layers]
    full: Any = next((each for each in found if each.kind == "heads"), None)
    convolution: Any = next((each for each in found if each.kind == "short_convolution"), None)
    if full is None:
        raise ConfigError("this family needs a layer of attention: got none")
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    dense = [each for each in networks if isinstance(each, FeedForwardConfig)]
    values = {
        "norm_eps": config.layers[0].norm.eps,
        "conv_L_cache": 3 if convolution is None else convolution.conv_kernel,
        "conv_bias": False if convolution is None else convolution.bias,
        "layer_types": [FULL if each == full else _CONV for each in found],
        "intermediate_size": dense[0].hidden_dim if dense else networks[0].expert.hidden_dim,
    }
    if len(dense) == len(networks):
        return values | {"block_auto_adjust_ff_dim": False}
    mixture = networks[-1]
    return values | {
        "num_dense_layers": len(dense),
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "use_expert_bias": mixture.choice_bias,
        "norm_topk_prob": mixture.normalize,
        "routed_scaling_factor": mixture.scale,
    }


_LAYER = "layers.{i}."
_NETWORK = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERTS = _LAYER + "feed_forward.experts."
STACKED_EXPERTS = (
    Rule(
        _EXPERTS + "gate_up_proj",
        (_EXPERTS + "{j}.gate_proj.weight", _EXPERTS + "{j}.up_proj.weight"),
        PerExpert(),
        Rows(),
    ),
    Rule(_EXPERTS + "down_proj", _EXPERTS + "{j}.down_proj.weight", PerExpert()),
)
TENSORS = Tensors(
    (
        Rule("embed_tokens", "embedding.tokens"),
        Rule("embedding_norm", "final_norm"),
        *under(
            _LAYER, _LAYER, {"operator_norm": "attention_norm", "ffn_norm": "feed_forward_norm"}
        ),
        *under(
            _LAYER + "self_attn.",
            _LAYER + "attention.",
            {"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
        ),
        Rule(_LAYER + "conv.in_proj", _LAYER + "attention.in_proj"),
        Rule(_LAYER + "conv.conv.weight", _LAYER + "attention.conv_weight", Shaped((1,))),
        Rule(_LAYER + "conv.conv.bias", _LAYER + "attention.conv_bias"),
        *under(_LAYER + "feed_forward.", _LAYER + "feed_forward.", _NETWORK),
        *under(_EXPERTS + "{j}.", _EXPERTS + "{j}.", _NETWORK),
        *STACKED_EXPERTS,
        Rule(_LAYER + "feed_forward.gate", _LAYER + "feed_forward.router"),
        Rule(_LAYER + "feed_forward.expert_bias", _LAYER + "feed_forward.choice_bias"),
        *(rule for rule in ATTENTION if rule.theirs[-6:] in ("q_proj", "k_proj", "v_proj")),
    ),
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The output projection's name depends on what a layer is."""
    kinds = values.get("layer_types")
    full = values.get("full_attn_idxs")
    if kinds is None:
        count = values["num_hidden_layers"]
        kinds = [FULL if full is None or i in full else _CONV for i in range(count)]
    rules = [
        Rule(
            f"layers.{i}.{'self_attn' if kind == FULL else 'conv'}.out_proj",
            f"layers.{i}.attention.o_proj",
        )
        for i, kind in enumerate(kinds)
    ]
    return TENSORS.extended(*rules)


def _from_gguf(values: Mapping[str, Any], *, dense: bool) -> dict[str, Any]:
    """Layers without kv heads are convolutions."""
    heads = values[".kv_heads"]
    heads = heads if isinstance(heads, list) else [heads] * values["num_hidden_layers"]
    adjusted = {"block_auto_adjust_ff_dim": False} if dense else {}
    return {
        **adjusted,
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if each else _CONV for each in heads],
    }


_GGUF = Gguf(
    "lfm2",
    settings={
        "attention.head_count_kv": ".kv_heads",
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "shortconv.l_cache": "conv_L_cache",
    },
    saved=False,  # which layers are convolutions is in no key of config.json
)

FAMILIES = (
    Family(
        "lfm2",
        "Lfm2",
        partial(read, experts=False),
        tensors,
        defaults={
            **_DEFAULTS,
            "intermediate_size": 12_288,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
        },
        write=write,
        harmless=_OF_TRAINING,
        gguf=replace(_GGUF, values=lambda values: _from_gguf(values, dense=True)),
    ),
    Family(
        "lfm2_moe",
        "Lfm2Moe",
        partial(read, experts=True),
        tensors,
        defaults={
            **_DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        write=write,
        harmless=_OF_TRAINING,
        gguf=replace(
            _GGUF,
            arch="lfm2moe",
            settings={
                **_GGUF.settings,
                "leading_dense_block_count": "num_dense_layers",
                "expert_weights_scale": "routed_scaling_factor",
                "expert_weights_norm": "norm_topk_prob",
            },
            constants=SIGMOID,
            names={_LAYER + "feed_forward.expert_bias": "blk.{i}.exp_probs_b.bias"},
            values=lambda values: _from_gguf(values, dense=False),
        ),
    ),
)
