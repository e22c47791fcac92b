"""GGUF files of Granite's mixtures with a network beside them, and of its hybrids with Mamba-2."""

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
