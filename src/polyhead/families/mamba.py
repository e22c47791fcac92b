"""Mamba (Gu & Dao, 2023, arXiv 2312.00752) and Falcon-Mamba (TII, 2024, arXiv 2410.05355), which
normalizes what steps, B and C are made of. Layers are a state-space mixer alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import InitialConfig, LayerConfig, MambaConfig, NormConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.gguf_states import ALONE, NOTHING_ELSE, divided, mamba_steps
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import UNLIMITED, read_decoder
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys, *, normed: bool) -> TransformerConfig:
    """The configuration that the keys mean.

    Args:
        keys: Keys of config.json.
        normed: Whether the mixer has norms without weights.
    """
    norm, width = NormConfig("rmsnorm", eps=keys.number("layer_norm_epsilon")), _width(keys)
    keys.flag("residual_in_fp32")  # the stream has the dtype of weights, which here is no less
    inner = NormConfig(eps=keys.number("mixer_rms_eps"), weight=False) if normed else None
    state = read_mamba(keys, width, inner)
    layers = [LayerConfig(state, None, norm)] * keys.num_layers("num_hidden_layers")
    return read_decoder(keys, layers, max_positions=UNLIMITED, norm=norm)


def read_mamba(
    keys: Keys,
    width: int,
    norm: NormConfig | None,
    *,
    num_groups: int = 1,
    activation: str = "hidden_act",
) -> MambaConfig:
    """The mixer that the keys mean.

    Args:
        keys: Keys of config.json.
        width: Channels.
        norm: Of what steps, B and C are made of.
        num_groups: Of the channels.
        activation: The key that names it.
    """
    keys.expect(activation, "silu", "swish")
    rank = keys.take("time_step_rank")
    if rank == "auto":
        rank = math.ceil(keys.size("hidden_size") / 16)
    if type(rank) is not int or rank < 1:
        raise keys.refused("time_step_rank", rank, "a whole number from 1, or 'auto'")
    return MambaConfig(
        width,
        keys.size("state_size"),
        rank,
        keys.whole("conv_kernel"),
        conv_bias=keys.flag("use_conv_bias"),
        bias=keys.flag("use_bias"),
        norm=norm,
        num_groups=num_groups,
    )


def _width(keys: Keys) -> int:
    width = keys.size("expand") * keys.size("hidden_size")
    keys.expect("intermediate_size", width, None)
    return width


def write(config: TransformerConfig) -> dict[str, Any]:
    state = config.layers[0].attention
    if not isinstance(state, MambaConfig):
        raise ConfigError("this family needs layers of Mamba")
    return {
        "layer_norm_epsilon": config.layers[0].norm.eps,
        **write_mamba(state, config.embed_dim),
        **({} if state.norm is None else {"mixer_rms_eps": state.norm.eps}),
    }


def write_mamba(state: MambaConfig, embed_dim: int) -> dict[str, Any]:
    """The inverse of ``read_mamba``."""
    return {
        "expand": state.num_heads // embed_dim,
        "state_size": state.state_dim,
        "time_step_rank": state.step_rank,
        "conv_kernel": state.conv_kernel,
        "use_conv_bias": state.conv_bias,
        "use_bias": state.bias,
    }


def mamba_rules(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Names of a mixer's tensors."""
    same = ("A_log", "D", "in_proj", "x_proj", "dt_proj")
    norms = {f"{name}_layernorm": f"{name}_norm" for name in ("dt", "b", "c")}
    return (
        *under(theirs, ours, {name: name for name in same} | norms),
        Rule(theirs + "out_proj", ours + "o_proj"),
        Rule(theirs + "conv1d.weight", ours + "conv_weight", Shaped((1,))),
        Rule(theirs + "conv1d.bias", ours + "conv_bias"),
    )


TENSORS = Tensors(
    (
        Rule("embeddings", "embedding.tokens"),
        Rule("embedding", "embedding.tokens"),
        Rule("norm_f", "final_norm"),
        Rule("layers.{i}.norm", "layers.{i}.attention_norm"),
        *mamba_rules("layers.{i}.mixer.", "layers.{i}.attention."),
    ),
    prefix="backbone.",
)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_280,
    "expand": 2,
    "state_size": 16,
    "time_step_rank": "auto",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_HARMLESS = frozenset(
    (
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_scale",
        "use_associative_scan",
        "use_falcon_mambapy",
        "use_mambapy",
    )
)
MAMBA_SETTINGS: dict[str, str | None] = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": ".inner",
    "ssm.state_size": "state_size",
    "ssm.time_step_rank": "time_step_rank",
}
"""Settings of GGUF files."""


def _settings_of(config: TransformerConfig) -> dict[str, Any]:
    return {**NOTHING_ELSE, **inner_size(config)}


def inner_size(config: TransformerConfig) -> dict[str, int]:
    """The setting of a mixer's channels."""
    found: list[Any] = [layer.attention for layer in config.layers]
    return {"ssm.inner_size": next(each.num_heads for each in found if each.kind == "mamba")}


_RMS = "ssm.dt_b_c_rms"
_GGUF = Gguf(
    "mamba",
    settings={**ALONE, **MAMBA_SETTINGS},
    constants={_RMS: False},
    steps=mamba_steps("layers.{i}.mixer."),
    values=lambda values: {"expand": divided(values, "hidden_size", "embedding_length")},
    settings_of=_settings_of,
    fits=lambda metadata: not metadata.get(f"mamba.{_RMS}"),
)

FAMILIES = (
    Family(
        "mamba",
        "Mamba",
        partial(read, normed=False),
        TENSORS,
        defaults=_DEFAULTS,
        write=write,
        harmless=_HARMLESS,
        initial=InitialConfig(scale=0.1),
        gguf=_GGUF,
    ),
    Family(
        "falcon_mamba",
        "FalconMamba",
        partial(read, normed=True),
        TENSORS,
        defaults=_DEFAULTS | {"mixer_rms_eps": 1e-6},
        write=write,
        harmless=_HARMLESS,
        initial=InitialConfig(scale=0.1),
        gguf=replace(
            _GGUF,
            constants={_RMS: True},
            fits=lambda metadata: bool(metadata.get(f"mamba.{_RMS}")),
        ),
    ),
)
