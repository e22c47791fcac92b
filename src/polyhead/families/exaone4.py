"""EXAONE 4 and K-EXAONE (LG 2025): layers with windows rotate, the others do not.

EXAONE 4 has norms after each part; K-EXAONE has them before, and DeepSeek-V3's mixture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import AttentionConfig, QKNormConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import SIGMOID, WINDOWS, Gguf, layer_types
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    DRAFTS,
    EXPERTS,
    GGUF_MIXTURE,
    drafting,
    read_networks,
    without_drafts,
    write_networks,
)
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, every, windowed
from polyhead.families.common.tables import AFTER, DECODER
from polyhead.families.common.tensors import Rule, Tensors


def read(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    attentions = _attentions(keys, plain)
    return plain.decoder([plain.layer(each, norm_placement="after") for each in attentions])


def read_mixed(keys: Keys) -> TransformerConfig:
    plain = Plain(keys)
    keys.expect("scoring_func", "sigmoid")
    keys.whole("num_nextn_predict_layers", 0)
    networks = read_networks(keys, "sigmoid", plain.network, plain.sizes.num_layers, listed=True)
    # Keys of the published file that repeat others.
    keys.expect("is_moe_layer", [each is not plain.network for each in networks], None)
    keys.expect("first_last_k_dense_replace", keys.whole("first_k_dense_replace"))
    return plain.decoder([*map(plain.layer, _attentions(keys, plain), networks)])


def _attentions(keys: Keys, plain: Plain) -> list[AttentionConfig]:
    count, window = plain.sizes.num_layers, keys.whole("sliding_window", None)
    period = _period(keys)
    attention = plain.attention(qk_norm=QKNormConfig(plain.norm))
    if window is None:
        keys.take("layer_types", None)  # without a window they all see and rotate everything
        return [attention] * count
    return windowed(keys, attention, count, every(count, period), rope=None)


def _period(keys: Keys) -> int:
    """Layers from one without a window to the next; files may say ``"LLLG"`` for 4."""
    pattern = keys.take("sliding_window_pattern", None)
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    if pattern is not None and (type(pattern) is not int or pattern < 0):
        wanted = "a number of layers, or L for each layer with a window and a G"
        raise keys.refused("sliding_window_pattern", pattern, wanted)
    return pattern or 4


_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def write_mixed(config: TransformerConfig) -> dict[str, Any]:
    return {_NAMES.get(key, key): value for key, value in write_networks(config).items()}


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """A file that states no window has none."""
    return {"sliding_window": values.get("sliding_window"), **layer_types(values)}


_CHOICE_BIAS = "layers.{i}.mlp.e_score_correction_bias"


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of K-EXAONE; GGUF files number layers that draft among the others."""
    bias = Rule(_CHOICE_BIAS, "layers.{i}.feed_forward.choice_bias")
    dropped = {**DECODER.dropped, r"mtp\..+": DRAFTS, **drafting(values)}
    return replace(DECODER.extended(bias, *EXPERTS), dropped=dropped)


_DEFAULTS = {key: value for key, value in PLAIN_DEFAULTS.items() if key != "attention_bias"} | {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}

FAMILIES = (
    Family(
        "exaone4",
        "Exaone4",
        read,
        AFTER,
        defaults=_DEFAULTS | {"bos_token_id": 0},
        gguf=Gguf("exaone4", WINDOWS, values=_from_gguf),
    ),
    Family(
        "exaone_moe",
        "ExaoneMoe",
        read_mixed,
        tensors,
        defaults=_DEFAULTS
        | {
            "bos_token_id": 1,
            "eos_token_id": 53,
            "pad_token_id": 0,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        aliases=_NAMES,
        write=write_mixed,
        gguf=Gguf(
            "exaone-moe",
            settings={**GGUF_MIXTURE, **WINDOWS, "expert_shared_feed_forward_length": None},
            constants=SIGMOID,
            names={_CHOICE_BIAS: "blk.{i}.exp_probs_b.bias"},
            values=lambda values: {**_from_gguf(values), **without_drafts(values)},
        ),
    ),
)
