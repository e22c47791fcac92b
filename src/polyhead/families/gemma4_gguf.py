"""GGUF files of Gemma 4, and what those of Gemma 3n share with them.

Layers differ in the sizes of their heads and networks, so settings are lists; which layers have one
projection for keys and values follows from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.gguf import WINDOWS, Gguf, layer_types, shape_of
from polyhead.families.common.gguf_rope import UNROTATED
from polyhead.families.common.reading import FULL, SLIDING

_THETA, _LOCAL_THETA = 1e6, 1e4
SHARED_SETTINGS: Mapping[str, str | None] = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    **WINDOWS,
}
"""Settings of GGUF files that Gemma 3n has too."""
_TABLE = "per_layer_token_embd.weight"


def vocab_per_layer(values: Mapping[str, Any]) -> dict[str, int]:
    """Rows of a GGUF file's vectors of single layers."""
    dim = values.get("hidden_size_per_layer_input", 0)
    rows = shape_of(values, _TABLE)[0] if dim else values["vocab_size"]
    return {"hidden_size_per_layer_input": dim, "vocab_size_per_layer_input": rows}


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = layer_types(values).get("layer_types", [])
    own = kinds[: len(kinds) - values.get("num_kv_shared_layers", 0)]
    values_of = [f"blk.{i}.attn_v.weight" for i, kind in enumerate(own) if kind == FULL]
    for rotated, size in ((".rotated", "global_head_dim"), (".rotated_swa", "head_dim")):
        if values.get(rotated, values.get(size)) != values.get(size):
            raise ConfigError(
                f"a part of heads, {values[rotated]} of {values.get(size)} features, is rotated; "
                "supported is all of them"
            )
    return {
        **layer_types(values),
        **vocab_per_layer(values),
        "attention_k_eq_v": any(name not in values[".tensors"] for name in values_of),
        "enable_moe_block": "num_experts" in values,
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_part(values.get("rope_scaling") or {}),
                "rope_theta": values.get(".theta", _THETA),
            },
            SLIDING: {"rope_type": "default", "rope_theta": values.get(".local", _LOCAL_THETA)},
        },
    }


def _rotated_part(scaling: Mapping[str, Any]) -> float:
    """The part of a head that is rotated, by the divisors of frequencies."""
    divisors = scaling.get("short_factor", [])
    count = sum(each == 1.0 for each in divisors)
    if not divisors or [each >= UNROTATED / 10 for each in divisors] != sorted(
        each != 1.0 for each in divisors
    ):
        raise ConfigError(
            f"rope_freqs.weight must hold ones and then {UNROTATED:g}: got {divisors}"
        )
    return float(count / len(divisors))


def shared_settings_of(config: TransformerConfig) -> dict[str, Any]:
    """Settings of GGUF files that differ between layers, and the two bases."""
    layers: list[Any] = [layer.attention for layer in config.layers]
    thetas = {layer.window is None: layer.rope.theta for layer in layers}
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    return {
        "feed_forward_length": [getattr(n, "dense", n).hidden_dim for n in networks],
        "rope.freq_base": thetas.get(True, _THETA),
        "rope.freq_base_swa": thetas.get(False, _LOCAL_THETA),
    }


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    layers: list[Any] = [layer.attention for layer in config.layers]
    full = next(each.head_dim for each in layers if each.window is None)
    narrow = next((each.head_dim for each in layers if each.window is not None), full)
    return {
        **shared_settings_of(config),
        "attention.head_count_kv": [each.num_kv_heads for each in layers],
        **{
            f"{key}{end}": size
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
            for end, size in (("", full), ("_swa", narrow))
        },
    }


GGUF = Gguf(
    "gemma4",
    settings={
        **SHARED_SETTINGS,
        "attention.key_length": "global_head_dim",
        "attention.key_length_swa": "head_dim",
        "attention.value_length": None,
        "attention.value_length_swa": None,
        "rope.dimension_count": ".rotated",
        "rope.dimension_count_swa": ".rotated_swa",
        "rope.freq_base": ".theta",
        "rope.freq_base_swa": ".local",
        "expert_used_count": "top_k_experts",
    },
    names={
        "layers.{i}.layer_scalar": "blk.{i}.layer_output_scale.weight",
        "layers.{i}.router.scale": "blk.{i}.ffn_gate_inp.scale",
        "layers.{i}.router.per_expert_scale": "blk.{i}.ffn_down_exps.scale",
        "layers.{i}.experts.gate_up_proj": "blk.{i}.ffn_gate_up_exps.weight",
        "layers.{i}.experts.down_proj": "blk.{i}.ffn_down_exps.weight",
    },
    values=_from_gguf,
    settings_of=_settings_of,
)
