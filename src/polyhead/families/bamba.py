"""Bamba (IBM, Princeton, UIUC; 2024): Mamba-2, and some layers of attention, which rotate half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mamba2 import (
    DEFAULTS,
    HARMLESS,
    mamba2_rules,
    read_mamba2,
    write_mamba2,
)
from polyhead.families.common.plain import Plain
from polyhead.families.common.reading import read_network
from polyhead.families.common.tables import ATTENTION, FREQUENCIES
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    network = read_network(keys, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, network=network, partial_rotary_factor=0.5)
    if plain.rope.dim is None or 2 * plain.rope.dim != plain.sizes.head_dim:
        raise keys.refused("partial_rotary_factor", plain.rope.dim, "0.5, as transformers computes")
    state = read_mamba2(keys, plain.sizes.embed_dim, plain.norm.eps)
    count, attention = plain.sizes.num_layers, plain.attention()
    full = keys.wholes("attn_layer_indices") if keys.has("attn_layer_indices") else []
    if any(not 0 <= i < count for i in full):
        raise keys.refused("attn_layer_indices", full, f"numbers of the {count} layers")
    return plain.decoder([plain.layer(attention if i in full else state) for i in range(count)])


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    full = next((each for each in found if each.kind == "heads"), None)
    state = next((each for each in found if each.kind == "mamba2"), None)
    if full is None or state is None or full.rope is None:
        raise ConfigError("this family needs layers of attention and of Mamba-2")
    return {
        "attn_layer_indices": [i for i, each in enumerate(found) if each == full],
        **write_mamba2(state, config.embed_dim),
    }


_LAYER = "layers.{i}."
AROUND_MIXERS = (
    Rule("embed_tokens", "embedding.tokens"),
    Rule("final_layernorm", "final_norm"),
    *under(
        _LAYER,
        _LAYER,
        {"input_layernorm": "attention_norm", "pre_ff_layernorm": "feed_forward_norm"},
    ),
    *under(
        _LAYER + "feed_forward.",
        _LAYER + "feed_forward.",
        {name: name for name in ("gate_proj", "up_proj", "down_proj")},
    ),
)
TENSORS = Tensors(
    (*AROUND_MIXERS, *mamba2_rules(_LAYER + "mamba.", _LAYER + "attention."), *ATTENTION),
    dropped=FREQUENCIES,
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """An output projection's name depends on what the layer is."""
    return TENSORS.extended(*of_attention(values.get("attn_layer_indices") or ()))


def of_attention(layers: Iterable[int]) -> list[Rule]:
    """The names of output projections in these layers, which mixers have otherwise."""
    return [Rule(f"layers.{i}.self_attn.o_proj", f"layers.{i}.attention.o_proj") for i in layers]


FAMILIES = (
    Family(
        "bamba",
        "Bamba",
        read,
        tensors,
        defaults={
            **DEFAULTS,
            "vocab_size": 128_000,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "attn_layer_indices": None,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        write=write,
        harmless=HARMLESS | {"z_loss_coefficient", "num_logits_to_keep"},
    ),
)
