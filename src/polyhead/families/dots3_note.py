"""The text model of dots3.note (2026): gated latent attention, in most layers to a window, in the
others to keys that an indexer chooses, with a norm over the rotary key.

Latents are scaled after their norms; of queries the scale is that of the scores. Layers with a
window have sizes of their own, which published files say by keys that begin with ``swa_``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    GatedLatentAttentionConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families import deepseek
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    DRAFTS,
    read_networks,
    write_dense_layers,
    write_mixture,
)
from polyhead.families.common.reading import FULL, SLIDING, read_decoder, read_layer_types
from polyhead.families.common.rope import reach, read_rope, write_ropes
from polyhead.families.common.steps import RotaryPairs
from polyhead.families.common.tensors import Rule, Tensors

_INDEXED = "indexed_attention"
_KINDS = (_INDEXED, SLIDING, FULL)
_THETA, _SWA_THETA, _WINDOW = 80_000_000.0, 50_000.0, 512
_SWA: Mapping[str, int] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Sizes of layers with a window where a file says nothing of them."""


def read(keys: Keys) -> TransformerConfig:
    num_layers = keys.num_layers("num_hidden_layers")
    positions = keys.whole("max_position_embeddings")
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    keys.expect("hidden_act", "silu", "swish")
    keys.expect("mlp_bias", False)
    kinds = _read_kinds(keys, num_layers)
    own, ropes = _read_sizes(keys, kinds), _rope_objects(keys, kinds)
    attentions = {
        kind: _attention(keys, kind, own[kind], ropes[kind], norm, positions)
        for kind in dict.fromkeys(kinds)
    }
    width = keys.size("shared_experts_intermediate_size")
    width = keys.size("moe_shared_expert_intermediate_size", width)
    shared = FeedForwardConfig(width * keys.size("n_shared_experts"), "silu")
    dense = FeedForwardConfig(keys.whole("intermediate_size"), "silu")
    layers = [
        LayerConfig(
            attentions[kind],
            replace(each, shared=shared) if isinstance(each, MixtureConfig) else each,
            norm,
        )
        for kind, each in zip(
            kinds, read_networks(keys, "sigmoid", dense, num_layers, listed=True), strict=True
        )
    ]
    rope = attentions[kinds[0]].rope
    assert rope is not None  # every kind has one
    return read_decoder(keys, layers, max_positions=reach(rope, positions), norm=norm)


def _read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """Which layers choose keys, have a window or neither; older files call the first full."""
    chooses = keys.take("use_dsa", None if keys.has("per_layer_config") else True)
    if chooses not in (None, True, False):
        raise keys.refused("use_dsa", chooses, "true, false or null")
    windows = keys.flag("use_sliding_window", True)
    full = FULL if chooses is False else _INDEXED
    default = [full if not windows or i < 2 or i % 4 == 1 else SLIDING for i in range(num_layers)]
    kinds = read_layer_types(keys, num_layers, default, _KINDS)
    renamed = {None: {}, True: {FULL: _INDEXED}, False: {_INDEXED: FULL}}[chooses]
    return [renamed.get(kind, kind) for kind in kinds]


def _read_sizes(keys: Keys, kinds: list[str]) -> dict[str, Keys]:
    """By kind of layer, the sizes in which its layers differ from those at the top."""
    swa = {name: keys.size(f"swa_{name}", size) for name, size in _SWA.items()}
    swa["qk_rope_head_dim"] = keys.whole(
        "swa_qk_rope_head_dim", swa["head_dim"] - swa["qk_nope_head_dim"]
    )
    stated = keys.take("per_layer_config", None)
    if stated is None:
        stated = {str(i): swa for i, kind in enumerate(kinds) if kind == SLIDING}
    wanted = "an object of each layer's sizes, the same in all of one of the layer_types"
    if not isinstance(stated, Mapping):
        raise keys.refused("per_layer_config", stated, wanted)
    found: dict[str, Any] = {}
    for i, kind in enumerate(kinds):
        values = stated.get(str(i)) or {}
        if not isinstance(values, Mapping) or found.setdefault(kind, values) != values:
            raise keys.refused("per_layer_config", stated, wanted)
    where = f"{keys.where}: per_layer_config"
    return {kind: Keys(dict(values), where) for kind, values in found.items()}


def _rope_objects(keys: Keys, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """By kind of layer, what says how its heads rotate."""
    theta, swa = keys.number("rope_theta", _THETA), keys.number("swa_rope_theta", _SWA_THETA)
    new, old = keys.take("rope_parameters", None), keys.take("rope_scaling", None)
    values = new or old or {}
    if not isinstance(values, Mapping):
        raise keys.refused("rope_parameters", values, "an object")
    # As transformers has it, what an object leaves out is not the base of windows.
    default = {kind: swa if kind == SLIDING and not values else theta for kind in kinds}
    nested = any(kind in values for kind in _KINDS)
    found: dict[str, dict[str, Any]] = {}
    for kind, base in default.items():
        inner = values.get(kind, {}) if nested else values
        if not isinstance(inner, Mapping):
            raise keys.refused("rope_parameters", values, "an object for each kind of layer")
        found[kind] = {"rope_theta": base, **inner}
        found[kind].pop("partial_rotary_factor", None)  # the sizes of heads say it
    return found


def _attention(
    keys: Keys, kind: str, own: Keys, rope: dict[str, Any], norm: NormConfig, positions: int
) -> LatentAttentionConfig:
    def size(name: str) -> int:
        return own.size(name, keys.size(name))

    heads, nope, rotated = (
        size("num_attention_heads"),
        size("qk_nope_head_dim"),
        size("qk_rope_head_dim"),
    )
    of_keys, head_dim = size("num_key_value_heads"), size("head_dim")
    own.finish(("q_lora_rank", "kv_lora_rank", "v_head_dim"))
    if of_keys != heads or (kind == SLIDING and head_dim != nope + rotated):
        raise keys.refused(
            "num_key_value_heads", of_keys, f"{heads}, with head_dim {nope + rotated} in {kind}"
        )
    width, rank, latent = keys.size("hidden_size"), size("q_lora_rank"), size("kv_lora_rank")
    given: dict[str, Any] = {
        "num_heads": heads,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotated,
        "v_head_dim": size("v_head_dim"),
        "q_lora_rank": rank,
        "bias": keys.flag("attention_bias"),
        "norm": norm,
        "latent_scale": math.sqrt(width / latent),
        "rope_norm": True,
        "scale": math.sqrt(width / rank / (nope + rotated)),
        "dropout": keys.number("attention_dropout"),
        "rope": read_rope(
            Keys({"rope_parameters": rope}, f"{keys.where}: rope_parameters.{kind}"),
            rotated,
            positions,
        ),
    }
    window = keys.size("sliding_window", keys.size("sliding_window_size", _WINDOW))
    indexer = IndexerConfig(
        keys.size("index_n_heads"), keys.size("index_head_dim"), keys.size("index_topk")
    )
    if kind == _INDEXED:
        return SparseLatentAttentionConfig(**given, indexer=indexer, gated=True, gate_per="head")
    return GatedLatentAttentionConfig(**given, window=window if kind == SLIDING else None)


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    if not all(getattr(each, "rope_norm", False) for each in found):
        raise ConfigError("in this family the rotary keys of latents have a norm")
    kinds = [
        _INDEXED if each.kind == "sparse_latent" else FULL if each.window is None else SLIDING
        for each in found
    ]
    of_kind = dict(zip(kinds, found, strict=True))
    base = next((each for kind, each in of_kind.items() if kind != SLIDING), found[0])
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    values: dict[str, Any] = {
        **_write_sizes(base),
        **write_ropes(
            {kind: each.rope for kind, each in of_kind.items()},
            {kind: each.qk_head_dim for kind, each in of_kind.items()},
        ),
        **write_dense_layers(config),
        "layer_types": kinds,
        "per_layer_config": {
            str(i): _write_sizes(each)
            for i, (kind, each) in enumerate(zip(kinds, found, strict=True))
            if kind == SLIDING
        },
    }
    if SLIDING in of_kind:
        values["sliding_window"] = of_kind[SLIDING].window
    if _INDEXED in of_kind:
        index = of_kind[_INDEXED].indexer
        values |= {
            "index_n_heads": index.num_heads,
            "index_head_dim": index.head_dim,
            "index_topk": index.top_k,
        }
    if dense is not None:
        values["intermediate_size"] = dense.hidden_dim
    if mixture is not None and mixture.shared is not None:
        # How many networks the shared one is changes nothing.
        shared = {"n_shared_experts": 1}
        shared["shared_experts_intermediate_size"] = mixture.shared.hidden_dim
        values |= {**write_mixture(mixture), **shared}
    return values


def _write_sizes(attention: Any) -> dict[str, Any]:
    return {
        **deepseek.write_attention(attention),
        "head_dim": attention.qk_head_dim,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
    }


@dataclass(frozen=True)
class SharedPairs(RotaryPairs):
    """``RotaryPairs`` of the rotary key alone."""

    def _sizes(self, attention: Any) -> tuple[int, int]:
        return attention.qk_rope_head_dim, attention.qk_rope_head_dim


_THEIRS, _OURS = "layers.{i}.self_attn.", "layers.{i}.attention."


def tensors(values: Mapping[str, Any]) -> Tensors:
    """DeepSeek's names and this family's own."""
    table = deepseek.tensors_with_pairs(values).extended(
        Rule(_THEIRS + "g_proj", _OURS + "gate_proj"),
        Rule(_THEIRS + "k_rope_only_layernorm", _OURS + "k_rope_norm", SharedPairs()),
    )
    return replace(table, dropped={**table.dropped, r"mtp\..+": DRAFTS})


FAMILIES = (
    Family(
        "dots3_note_text",
        "Dots3Note",
        read,
        tensors,
        defaults={
            **{key: each for key, each in deepseek.V32_DEFAULTS.items() if "interleave" not in key},
            "rms_norm_eps": 1e-5,
            "head_dim": 256,
            "q_lora_rank": 1024,
            "sliding_window": None,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "shared_experts_intermediate_size": 1536,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "mlp_bias": False,
            "bos_token_id": 151_643,
            "eos_token_id": 151_668,
            "pad_token_id": 151_659,
        },
        write=write,
        bare="TextModel",
        harmless=frozenset(("num_nextn_predict_layers", "router_aux_loss_coef")),
    ),
)
