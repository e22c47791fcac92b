"""The text model of Step 3.7 Flash, and Step 3.5 Flash (StepFun 2026): heads gated one by one.

Layers with windows have a number of heads of their own. Each layer says what its experts, and its
dense or shared network, are clamped to: the activated gates, not what enters the activation.
transformers has this model without a head (``Step3p7TextModel``) or with images alone; a file with
a head names the class of the published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    GatedAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    EXPERTS,
    STACKED_EXPERTS,
    drafting,
    write_dense_layers,
)
from polyhead.families.common.plain import PLAIN_DEFAULTS, windowed, write_ropes_of_kinds
from polyhead.families.common.reading import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    read_decoder,
    read_layer_types,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_ropes
from polyhead.families.common.steps import PerExpert
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule, Tensors, under

_MIXTURE = "layers.{i}.feed_forward."
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_KINDS = ("dense", "sparse")
_FIRST_SPARSE = 3


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), NormConfig(eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    count, biased = sizes.num_layers, keys.flag("attention_bias")
    keys.whole("num_nextn_predict_layers")
    kinds = read_layer_types(_cut(keys, "layer_types"), count, [FULL] * count)
    ropes = _read_ropes(keys, kinds, sizes.head_dim, sizes.max_positions)
    scaled = keys.number("query_pre_attn_scalar", None)
    if scaled is not None and scaled <= 0:
        raise keys.refused("query_pre_attn_scalar", scaled, "a number above 0")
    attention = GatedAttentionConfig(
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=QKNormConfig(norm),
        rope=ropes.get(SLIDING),
        scale=None if scaled in (None, sizes.head_dim) else scaled**-0.5,
        dropout=keys.number("attention_dropout"),
        gate_per="head",
        gate_bias=False,
    )
    window = {"layer_types": kinds, "sliding_window": keys.whole("sliding_window", None)}
    attentions = windowed(Keys(window, keys.where), attention, count, kinds, rope=ropes.get(FULL))
    heads = _read_heads(keys, kinds, sizes.num_heads)
    limits = _limits(keys, "swiglu_limits", count)
    limits_of_shared = _limits(keys, "swiglu_limits_shared", count)
    mlp_bias = keys.flag("mlp_bias")
    dense = FeedForwardConfig(keys.whole("intermediate_size"), bias=mlp_bias)
    mixture = MixtureConfig(
        FeedForwardConfig(keys.whole("moe_intermediate_size")),
        keys.whole("n_routed_experts"),
        keys.whole("num_experts_per_tok"),
        shared=FeedForwardConfig(keys.whole("share_expert_dim"), bias=mlp_bias),
        scoring="sigmoid",
        choice_bias=True,
        normalize=True,
        scale=keys.number("moe_router_scaling_factor"),
    )
    layers = [
        LayerConfig(
            replace(attentions[i], num_heads=heads[i]),
            _clamped(dense, limits_of_shared[i])
            if kind == "dense"
            else replace(
                mixture,
                expert=_clamped(mixture.expert, limits[i]),
                shared=_clamped(mixture.shared, limits_of_shared[i]),
            ),
            norm,
        )
        for i, kind in enumerate(_read_networks(keys, count))
    ]
    far = ropes.get(FULL) or ropes[SLIDING]
    return read_decoder(keys, layers, max_positions=reach(far, sizes.max_positions), norm=norm)


def _cut(keys: Keys, key: str) -> Keys:
    """Keys with one list alone, without what it says of layers of multi-token prediction."""
    found = keys.take(key, None)
    count, extra = keys.whole("num_hidden_layers"), keys.whole("num_nextn_predict_layers")
    if isinstance(found, list) and extra > 0 and len(found) == count + extra:
        found = found[:count]
    return Keys({key: found}, keys.where)


def _read_networks(keys: Keys, count: int) -> list[str]:
    """Which layers have experts: by a list, by numbers in one text, or those from a fourth on."""
    numbers, sparse = keys.take("moe_layers_enum", None), [*range(_FIRST_SPARSE, count)]
    if numbers is not None:
        parts = numbers.split(",") if isinstance(numbers, str) else numbers
        if not isinstance(parts, list) or not all(str(each).strip().isdecimal() for each in parts):
            raise keys.refused("moe_layers_enum", numbers, "numbers of layers with commas between")
        sparse = [int(each) for each in parts]
    default = ["sparse" if i in sparse else "dense" for i in range(count)]
    return read_layer_types(
        _cut(keys, "mlp_layer_types"), count, default, _KINDS, "mlp_layer_types"
    )


def _read_heads(keys: Keys, kinds: list[str], full: int) -> list[int]:
    """The number of heads of every layer."""
    near, older = keys.size("num_sliding_attention_heads", None), keys.take(_OLDER, None)
    if near is None and isinstance(older, Mapping):
        near = Keys(older, f"{keys.where}: {_OLDER}").size("num_attention_heads", None)
    heads = [near or full if kind == SLIDING else full for kind in kinds]
    layers = keys.take("per_layer_config", None)
    if layers is None:
        return heads
    wanted = "by a layer's number an object with num_attention_heads alone"
    if not isinstance(layers, Mapping):
        raise keys.refused("per_layer_config", layers, wanted)
    heads = [full] * len(kinds)
    for name, each in layers.items():
        one = isinstance(each, Mapping) and each.keys() <= {"num_attention_heads"}
        if not one or not str(name).isdecimal() or int(name) >= len(kinds):
            raise keys.refused("per_layer_config", layers, wanted)
        heads[int(name)] = Keys(each, keys.where).size("num_attention_heads", full)
    return heads


def _limits(keys: Keys, key: str, count: int) -> list[float | None]:
    """What every layer is clamped to; null and 0 are nothing."""
    found = _cut(keys, key).take(key)
    if found is None:
        return [None] * count
    known = isinstance(found, list) and all(
        each is None or (type(each) in (int, float) and each >= 0) for each in found
    )
    if not known or len(found) != count:
        raise keys.refused(key, found, f"{count} numbers from 0, or null")
    return [each or None for each in found]


def _clamped(network: Any, limit: float | None) -> Any:
    return network if limit is None else replace(network, clamp=limit, clamp_of="activated")


def _read_ropes(
    keys: Keys, kinds: list[str], head_dim: int, max_positions: int
) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of layer; older files say it of every layer in lists."""
    values, there = keys.take("rope_parameters", None), [k for k in LAYER_TYPES if k in kinds]
    theta, parts = _cut(keys, "rope_theta"), _cut(keys, "partial_rotary_factors")
    scaling = keys.take("rope_scaling", None)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise keys.refused("rope_scaling", scaling, "an object or null")
    keys.expect("yarn_only_types", [FULL])
    if not values:
        values = {}
        for kind in there:
            values[kind] = {"rope_theta": _of_kind(theta, "rope_theta", kind, kinds) or 1e4}
            part = _of_kind(parts, "partial_rotary_factors", kind, kinds)
            values[kind] |= {} if part is None else {"partial_rotary_factor": part}
            values[kind] |= (scaling or {}) if kind == FULL else {}
    elif not isinstance(values, Mapping) or not all(values.get(kind) for kind in there):
        raise keys.refused("rope_parameters", values, f"an object with {' and '.join(there)}")
    stated = Keys({"rope_parameters": {k: values[k] for k in there}}, keys.where)
    return read_ropes(
        stated, head_dim, max_positions, dict.fromkeys(there), partial_rotary_factor=1.0
    )


def _of_kind(keys: Keys, key: str, kind: str, kinds: list[str]) -> Any:
    """What a list says of all layers of a kind, or a number of all."""
    found = keys.take(key)
    if not isinstance(found, list):
        return found
    of_kind = [each for each, one in zip(found, kinds, strict=False) if one == kind]
    if len(found) != len(kinds) or any(each != of_kind[0] for each in of_kind):
        raise keys.refused(key, found, f"{len(kinds)} numbers, the same in layers of a kind")
    return of_kind[0]


def write(config: TransformerConfig) -> dict[str, Any]:
    attentions: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    first = attentions[0]
    full = next((each.num_heads for each in attentions if each.window is None), first.num_heads)
    near = next((each.num_heads for each in attentions if each.window is not None), full)
    shared = [getattr(each, "shared", each) for each in networks]
    values = {
        "num_attention_heads": full,
        "num_sliding_attention_heads": near,
        "query_pre_attn_scalar": first.head_dim if first.scale is None else first.scale**-2,
        "swiglu_limits": [getattr(each, "expert", _NOTHING).clamp for each in networks],
        "swiglu_limits_shared": [each.clamp for each in shared],
        "mlp_bias": shared[0].bias,
        **write_ropes_of_kinds(config, 512),  # transformers wants a window where none has one
        **write_dense_layers(config),
        **({"intermediate_size": dense.hidden_dim} if dense else {}),
    }
    if any(each.num_heads != (full if each.window is None else near) for each in attentions):
        values["per_layer_config"] = {
            str(i): {"num_attention_heads": each.num_heads} for i, each in enumerate(attentions)
        }
    if mixture is None or mixture.shared is None:
        return values
    return values | {
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "moe_intermediate_size": mixture.expert.hidden_dim,
        "share_expert_dim": mixture.shared.hidden_dim,
        "moe_router_scaling_factor": mixture.scale,
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """transformers' names of the text model alone, and those of published files."""
    published = (
        Rule("layers.{i}.moe.gate", _MIXTURE + "router"),
        Rule("layers.{i}.moe.router_bias", _MIXTURE + "choice_bias"),
        *(
            Rule(f"layers.{{i}}.moe.{n}.weight", f"{_MIXTURE}experts.{{j}}.{n}.weight", PerExpert())
            for n in _PROJECTIONS
        ),
        *under("layers.{i}.share_expert.", _MIXTURE + "shared.", {n: n for n in _PROJECTIONS}),
    )
    table = DECODER.extended(
        Rule("layers.{i}.self_attn.g_proj", "layers.{i}.attention.gate_proj"),
        *STACKED_EXPERTS,
        *EXPERTS,
        *published,
    )
    return replace(table, dropped={**table.dropped, **drafting(values)})


_NOTHING = FeedForwardConfig(1)
_OLDER = "attention_other_setting"
_IGNORED = (
    "att_impl_type", "hidden_act", "max_seq_len", "moe_every_n_layer", "moe_layer_offset",
    "moe_router_activation", "mtp_layer_types", "mtp_mlp_layer_types", "need_fp32_gate",
    "norm_expert_weight", "num_local_experts", "sink", "use_head_wise_attn_gate", "use_mfa",
    "use_moe", "use_moe_router_bias", "use_qk_norm", "use_rope_layers", "zero_centered",
)  # fmt: skip
"""Keys of published files that transformers' class reads nowhere."""

FAMILIES = (
    Family(
        "step3p5",
        "",
        read,
        tensors,
        defaults=PLAIN_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "num_nextn_predict_layers": 0,
            "n_routed_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "sliding_window": None,
            "num_sliding_attention_heads": None,
            "query_pre_attn_scalar": None,
            "moe_router_scaling_factor": 1.0,
            "mlp_bias": False,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": 1,
        },
        write=write,
        with_head="Step3p5ForCausalLM",
        bare="Step3p7TextModel",
        aliases={
            "num_key_value_heads": "num_attention_groups",
            "n_routed_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_top_k",
        },
        not_supported={"use_bidirectional_attention": "it sees every token, and is no decoder"},
        harmless=frozenset(_IGNORED),
    ),
)
