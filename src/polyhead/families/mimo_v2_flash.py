"""MiMo-V2-Flash (Xiaomi 2025): windows with sinks and twice the kv heads in most layers, a third of
each head rotated, scaled values of a size of their own, and DeepSeek-V3's mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import FeedForwardConfig, LayerConfig, MixtureConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import SIGMOID, WINDOWS, Gguf
from polyhead.families.common.gguf_states import KV_HEADS, by_layer
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    CHOICE_BIAS,
    DRAFTS,
    EXPERTS,
    GGUF_MIXTURE,
    dense_layers,
    drafting,
    read_mixture,
    without_drafts,
    write_dense_layers,
    write_mixture,
)
from polyhead.families.common.plain import PLAIN_DEFAULTS, write_ropes_of_kinds
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes_of_kinds
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.tables import AROUND_LAYERS, ATTENTION, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors

_PART = 0.334
_ROPES = {
    kind: {"rope_theta": theta, "partial_rotary_factor": _PART}
    for kind, theta in ((FULL, 5e6), (SLIDING, 1e4))
}


def read(keys: Keys) -> TransformerConfig:
    sizes, norm, dense = read_sizes(keys), read_rms_norm(keys), read_network(keys)
    count = sizes.num_layers
    default = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    kinds = read_layer_types(keys, count, default)
    ropes = read_ropes_of_kinds(keys, sizes.head_dim, sizes.max_positions, _ROPES, _PART)
    window, behind = keys.whole("sliding_window"), keys.whole("sliding_window_size", None)
    full = sizes.attention(
        v_head_dim=keys.size("v_head_dim"),
        qkv_bias=keys.flag("attention_bias"),
        rope=ropes[FULL],
        dropout=keys.number("attention_dropout"),
        value_scale=keys.number("attention_value_scale", 1.0),
    )
    near = replace(
        full,
        num_kv_heads=2 * sizes.num_kv_heads,
        rope=ropes[SLIDING],
        window=window if behind is None else behind + 1,
        sinks=True,
    )
    keys.expect("scoring_func", "sigmoid")
    mixture = read_mixture(keys, "sigmoid", dense)
    are_dense = dense_layers(keys, count, keys.texts("mlp_layer_types", []))
    layers = [
        LayerConfig(near if kind == SLIDING else full, dense if is_dense else mixture, norm)
        for kind, is_dense in zip(kinds, are_dense, strict=True)
    ]
    rope = ropes[FULL]
    return read_decoder(
        keys,
        layers,
        max_positions=sizes.max_positions if rope is None else reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    first = attentions[0]
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    return {
        "num_key_value_heads": first.num_kv_heads // (1 if first.window is None else 2),
        "v_head_dim": first.value_dim,
        "attention_value_scale": first.value_scale,
        **write_ropes_of_kinds(config, 129),
        **write_dense_layers(config),
        **(write_mixture(mixture) if mixture else {}),
        **({"intermediate_size": dense.hidden_dim} if dense else {}),
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; layers that predict further tokens may follow the model's own."""
    return Tensors(
        (
            *AROUND_LAYERS,
            *NORMS,
            *ATTENTION,
            Rule("layers.{i}.self_attn.attention_sink_bias", "layers.{i}.attention.sinks"),
            *NETWORK,
            *EXPERTS,
        ),
        dropped={r"mtp\..+": DRAFTS, **drafting(values)},
    )


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    count = without_drafts(values)["num_hidden_layers"]
    near = [bool(each) for each in by_layer(values, ".windows")[:count]]
    heads = by_layer(values, ".kv_heads")[:count]
    few = next((n for n, each in zip(heads, near, strict=False) if not each), heads[0] // 2)
    if heads != [2 * few if each else few for each in near]:
        raise ConfigError(
            f"attention.head_count_kv is {heads}; supported are twice as many "
            "in layers with windows"
        )
    size = values.get("head_dim") or 1
    part = values.get(".rotated", size) / size
    # The first files lack the factor of values, and layers of drafts.
    stated = "attention_value_scale" in values
    newer = {} if stated or "num_nextn_predict_layers" not in values else {_VALUES: None}
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in values[".tensors"] for i in range(count)]
    return {
        **newer,
        "num_hidden_layers": count,
        "num_key_value_heads": few,
        "layer_types": [SLIDING if each else FULL for each in near],
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta in (
                (FULL, values.get(".theta", 1e4)),
                (SLIDING, values.get(".local", values.get(".theta", 1e4))),
            )
        },
    }


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    bases = {each.window is None: each.rope.theta for each in found}
    rope = found[0].rope
    return {
        "attention.head_count_kv": [each.num_kv_heads for each in found],
        "attention.sliding_window_pattern": [each.window is not None for each in found],
        "rope.dimension_count": rope.dim or found[0].head_dim,
        "rope.freq_base": bases.get(True, bases.get(False)),
        "rope.freq_base_swa": bases.get(False, bases.get(True)),
    }


_VALUES = "attention_value_scale"
_QKV = {f"blk.{{i}}.attn_{name}": f"layers.{{i}}.attention.{name}_proj" for name in "qkv"}
_GGUF = Gguf(
    "mimo2",
    settings={
        **{key: each for key, each in GGUF_MIXTURE.items() if "leading" not in key},
        **KV_HEADS,
        **WINDOWS,
        "attention.value_length": "v_head_dim",
        "attention.value_scale": _VALUES,
        "rope.dimension_count": ".rotated",
        "rope.freq_base": ".theta",
        "rope.freq_base_swa": ".local",
    },
    constants=SIGMOID,
    names={
        **CHOICE_BIAS,
        "layers.{i}.self_attn.attention_sink_bias": "blk.{i}.attn_sinks.weight",
    },
    # MiMo-V2.5's files have one matrix of queries, keys and values.
    rules=(
        *(Rule(theirs, ours) for theirs, ours in _QKV.items()),
        Rule("blk.{i}.attn_qkv", tuple(_QKV.values()), QKVRows()),
    ),
    values=_from_gguf,
    settings_of=_settings_of,
)

FAMILIES = (
    Family(
        "mimo_v2_flash",
        "MiMoV2Flash",
        read,
        tensors,
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 0,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "eos_token_id": None,
        },
        write=write,
        harmless=frozenset(("num_nextn_predict_layers", "router_aux_loss_coef")),
        gguf=_GGUF,
    ),
)
