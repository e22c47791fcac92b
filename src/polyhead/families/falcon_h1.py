"""Falcon-H1 (TII, 2025, arXiv 2507.22448): attention and Mamba-2 side by side in every layer, with
factors of what each part reads and gives (µP).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from polyhead.config import AttentionConfig, HybridHeadsConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.bamba import AROUND_MIXERS
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.gguf_states import (
    MAMBA2,
    mamba2_names,
    mamba2_size,
    mamba2_steps,
    mamba2_values,
)
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
from polyhead.families.common.tensors import Rule, Tensors

_ONES = (1.0,) * 5


def read(keys: Keys) -> TransformerConfig:
    gate, out = _factors(keys, "mlp_multipliers", 2)
    network = read_network(keys, bias=keys.flag("mlp_bias"))
    plain = Plain(keys, network=replace(network, gate_scale=gate, out_scale=out))
    width, factors = keys.size("mamba_d_ssm", None), _factors(keys, "ssm_multipliers", 5)
    place = "before" if keys.flag("mamba_norm_before_gate") else "after"
    state = read_mamba2(
        keys,
        plain.sizes.embed_dim,
        plain.norm.eps,
        width,
        out_bias=keys.flag("projectors_bias"),
        norm_place=place if keys.flag("mamba_rms_norm") else None,
        in_scales=() if factors == _ONES else factors,
    )
    heads, of_keys = plain.attention(), keys.number("key_multiplier")
    if of_keys != 1.0:  # what multiplies keys multiplies scores
        heads = replace(heads, scale=of_keys * heads.head_dim**-0.5)
    layer = HybridHeadsConfig(
        **{each.name: getattr(heads, each.name) for each in fields(AttentionConfig)},
        mamba=state,
        attention_scales=_ends(keys, "attention"),
        mamba_scales=_ends(keys, "ssm"),
    )
    return plain.decoder(
        [plain.layer(layer)],
        embedding_scale=keys.number("embedding_multiplier"),
        logit_scale=keys.positive("lm_head_multiplier"),
    )


def _factors(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    found = keys.numbers(key, [1.0] * count)
    if len(found) != count:
        raise keys.refused(key, found, f"{count} numbers")
    return tuple(map(float, found))


def _ends(keys: Keys, part: str) -> tuple[float, float]:
    """Factors of what a part reads and of what it gives."""
    return keys.number(f"{part}_in_multiplier"), keys.number(f"{part}_out_multiplier")


def write(config: TransformerConfig) -> dict[str, Any]:
    layer, network = config.layers[0].attention, config.layers[0].feed_forward
    if not isinstance(layer, HybridHeadsConfig) or network is None:
        raise ConfigError("this family needs attention and Mamba-2 side by side in every layer")
    state, scales = layer.mamba, {"attention": layer.attention_scales, "ssm": layer.mamba_scales}
    sizes: Any = network
    return {
        **write_mamba2(state, config.embed_dim),
        "mamba_expand": 2,
        "mamba_d_ssm": state.num_heads * state.head_dim,
        "mamba_rms_norm": state.norm_place is not None,
        "mamba_norm_before_gate": state.norm_place != "after",
        "projectors_bias": state.has_out_bias,
        "ssm_multipliers": [*(state.in_scales or _ONES)],
        "mlp_multipliers": [sizes.gate_scale, sizes.out_scale],
        "key_multiplier": 1.0 if layer.scale is None else _of_keys(layer.scale, layer.head_dim),
        **{f"{part}_in_multiplier": read for part, (read, _) in scales.items()},
        **{f"{part}_out_multiplier": given for part, (_, given) in scales.items()},
        "embedding_multiplier": config.embedding.scale,
        "lm_head_multiplier": config.logit_scale,
    }


def _of_keys(scale: float, head_dim: int) -> float:
    """The factor of keys from which reading makes ``scale``."""
    unit = head_dim**-0.5
    near = scale / unit
    ends = near, math.nextafter(near, -math.inf), math.nextafter(near, math.inf)
    return next((each for each in ends if each * unit == scale), near)


TENSORS = Tensors(
    (
        *AROUND_MIXERS,
        *mamba2_rules("layers.{i}.mamba.", "layers.{i}.attention.mamba."),
        *ATTENTION,
    ),
    dropped=FREQUENCIES,
)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The converter has multiplied weights by the factors; it norms behind the gate."""
    return {
        **mamba2_values(values),
        "mamba_d_ssm": values[".inner"],
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in values[".tensors"]),
        "mamba_norm_before_gate": False,
    }


FAMILIES = (
    Family(
        "falcon_h1",
        "FalconH1",
        read,
        TENSORS,
        defaults={
            **DEFAULTS,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "vocab_size": 128_000,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "mlp_multipliers": None,
            "ssm_multipliers": None,
            **{
                f"{part}_{end}_multiplier": 1.0
                for part in ("attention", "ssm")
                for end in ("in", "out")
            },
            "key_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        write=write,
        harmless=HARMLESS | {"num_logits_to_keep"},
        gguf=Gguf(
            "falcon-h1",
            settings=MAMBA2,
            names=mamba2_names("layers.{i}.mamba."),
            steps=mamba2_steps("layers.{i}.mamba."),
            rules=(Rule("blk.{i}.ffn_norm", "layers.{i}.feed_forward_norm.weight"),),
            values=_from_gguf,
            settings_of=mamba2_size,
        ),
    ),
)
