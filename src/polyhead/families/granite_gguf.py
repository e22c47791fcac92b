"""GGUF files of Granite's mixtures with a network beside them, and of its hybrids with Mamba-2.

Granite's keys say MiniCPM (OpenBMB 2024, 2025) and Ling too, for which transformers has no class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.gguf import EXPERTS, PAIRS, Gguf
from polyhead.families.common.gguf_states import (
    KV_HEADS,
    MAMBA2,
    attends,
    kv_heads,
    kv_heads_of,
    mamba2_alone,
    mamba2_names,
    mamba2_size,
    mamba2_steps,
)
from polyhead.families.common.reading import FULL, LINEAR
from polyhead.families.common.tensors import Rule

SCALES: Mapping[str, str | None] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_OF_MINICPM = {key: value for key, value in SCALES.items() if key != "attention.scale"}
_MIXTURES: Mapping[str, str | None] = {**SCALES, "expert_count": "num_local_experts"}
_BESIDE = "expert_shared_feed_forward_length"
_SHARED: Mapping[str, str | None] = {**_MIXTURES, _BESIDE: "shared_intermediate_size"}
_NETWORK = "layers.{i}.feed_forward."


def _rules(end: str, ours: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"blk.{{i}}.ffn_{name}{end}", f"{ours}{name}_proj") for name in ("gate", "up", "down")
    )


def _has_network_beside(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get("granitemoe." + _BESIDE))


def _hybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get(".rotates"):
        raise ConfigError(
            "rope.scaling.finetuned is True, as in files of Bamba, which are not read: the "
            "converter reorders whole heads, of which the model rotates a half"
        )
    return {
        **mamba2_alone(values),
        **kv_heads(values),
        "layer_types": [FULL if each else LINEAR for each in attends(values)],
        "position_embedding_type": "nope",
        "num_local_experts": values.get("num_local_experts", 0),
        "shared_intermediate_size": values.get(
            "shared_intermediate_size", values.get("intermediate_size")
        ),
    }


def _minicpm(values: Mapping[str, Any]) -> dict[str, Any]:
    for setting, key in _OF_MINICPM.items():
        if key not in values:
            raise ConfigError(f"key 'minicpm.{setting}' is missing; files of early 2024 lack it")
    return _usual_scale(values)


def _bailingmoe(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values.get(".normalizes"):
        raise ConfigError(
            "expert_weights_norm must be True, as in Ling-lite and Ling-plus: got "
            f"{values.get('.normalizes')}"
        )
    width = values.get(".shared", 0) * values.get("intermediate_size", 0)
    return {**_usual_scale(values), "shared_intermediate_size": width}


def _usual_scale(values: Mapping[str, Any]) -> dict[str, Any]:
    # The reader reports sizes that are not above 0.
    heads = max(1, values["num_attention_heads"])
    size = values.get("head_dim") or values["hidden_size"] // heads
    return {"attention_multiplier": max(1, size) ** -0.5}


def _settings_of_hybrid(config: TransformerConfig) -> dict[str, Any]:
    return {
        **mamba2_size(config),
        **kv_heads_of(config),
        "rope.scaling.finetuned": False,
    }


MIXTURE = Gguf(
    "granitemoe",
    settings=_MIXTURES,
    steps=PAIRS,
    rules=EXPERTS,
    fits=lambda metadata: not _has_network_beside(metadata),
)
SHARED = Gguf(
    "granitemoe",
    settings=_SHARED,
    steps=PAIRS,
    rules=(*EXPERTS, *_rules("_shexp", _NETWORK + "shared.")),
    fits=_has_network_beside,
)
HYBRID = Gguf(
    "granitehybrid",
    settings={**_SHARED, **MAMBA2, **KV_HEADS, "rope.scaling.finetuned": ".rotates"},
    names=mamba2_names("layers.{i}.mamba."),
    steps=mamba2_steps("layers.{i}.mamba."),
    rules=(*EXPERTS, *_rules("_shexp", _NETWORK + "shared."), *_rules("", _NETWORK)),
    values=_hybrid,
    settings_of=_settings_of_hybrid,
)

MINICPM = Gguf("minicpm", settings=_OF_MINICPM, steps=PAIRS, values=_minicpm, saved=False)
BAILINGMOE = Gguf(
    "bailingmoe",
    settings={
        "expert_count": "num_local_experts",
        "expert_feed_forward_length": "intermediate_size",
        "expert_shared_count": ".shared",
        "expert_weights_norm": ".normalizes",
        "feed_forward_length": None,  # of dense layers, which there are none of
    },
    constants={"leading_dense_block_count": 0, "expert_weights_scale": 1, "expert_gating_func": 1},
    steps=PAIRS,
    rules=SHARED.rules,
    values=_bailingmoe,
    saved=False,
)
"""Ling-lite and Ling-plus (inclusionAI 2025), whose multipliers are 1."""
