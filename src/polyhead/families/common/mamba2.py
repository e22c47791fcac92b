"""Keys and names of Mamba-2 layers, as the hybrids of attention and states share them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from polyhead.config import Mamba2Config
from polyhead.families.common.keys import Keys
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tensors import Rule, under

DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}
_INFINITY = {"__float__": "Infinity"}
"""As transformers writes it."""
HARMLESS = frozenset(("mamba_chunk_size",))


def read_mamba2(
    keys: Keys, embed_dim: int, eps: float, width: int | None = None, **options: Any
) -> Mamba2Config:
    """The layer that the keys mean.

    Args:
        keys: Keys of config.json.
        embed_dim: ``hidden_size``.
        eps: Of its norm.
        width: Values of all heads, where ``mamba_expand`` does not say it.
        **options: What a family has beside them.
    """
    keys.expect("hidden_act", "silu", "swish")  # it follows the convolution too
    heads, expanded = keys.size("mamba_n_heads"), keys.size("mamba_expand") * embed_dim
    width = expanded if width is None else width
    size = keys.take("mamba_d_head")
    if size in ("auto", None):
        size = width // heads
    if type(size) is not int or size < 1 or size * heads != width:
        raise keys.refused("mamba_d_head", size, f"{width} / {keys.named('mamba_n_heads')}")
    low, high = _limits(keys)
    if "bias" not in options:
        options["bias"] = keys.flag("mamba_proj_bias")
    return Mamba2Config(
        heads,
        keys.size("mamba_n_groups"),
        keys.size("mamba_d_state"),
        size,
        keys.whole("mamba_d_conv"),
        conv_bias=keys.flag("mamba_conv_bias"),
        norm_eps=eps,
        **{"dt_min": low, "dt_max": high, **options},
    )


def _limits(keys: Keys) -> tuple[float, float | None]:
    stated = keys.take("time_step_limit", None) or DEFAULTS["time_step_limit"]
    pair = [*stated] if isinstance(stated, list | tuple) else []
    ends = [math.inf if each == _INFINITY else each for each in pair]
    numbers = len(ends) == 2 and all(type(each) in (int, float) for each in ends)
    if not numbers or not 0 <= ends[0] <= ends[1] or ends[0] == math.inf:
        raise keys.refused("time_step_limit", stated, "two numbers from 0, ascending")
    return float(ends[0]), None if ends[1] == math.inf else float(ends[1])


def write_mamba2(
    state: Mamba2Config, embed_dim: int, names: Mapping[str, str] = {}
) -> dict[str, Any]:
    """The inverse of ``read_mamba2``.

    Args:
        state: To be written.
        embed_dim: ``hidden_size``.
        names: The family's own spelling of keys.
    """
    limits = [state.dt_min, _INFINITY if state.dt_max is None else state.dt_max]
    stated = {} if limits == [0.0, _INFINITY] else {"time_step_limit": limits}
    values = stated | {
        "mamba_n_heads": state.num_heads,
        "mamba_d_head": state.head_dim,
        "mamba_n_groups": state.num_groups,
        "mamba_d_state": state.state_dim,
        "mamba_d_conv": state.conv_kernel,
        "mamba_expand": state.num_heads * state.head_dim // embed_dim,
        "mamba_conv_bias": state.conv_bias,
        "mamba_proj_bias": state.bias,
    }
    return {names.get(key, key): value for key, value in values.items()}


def mamba2_rules(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Names of a layer's tensors."""
    return (
        *under(theirs, ours, {name: name for name in ("A_log", "D", "dt_bias", "in_proj")}),
        Rule(theirs + "out_proj", ours + "o_proj"),
        Rule(theirs + "norm", ours + "norm"),
        Rule(theirs + "conv1d.weight", ours + "conv_weight", Shaped((1,))),
        Rule(theirs + "conv1d.bias", ours + "conv_bias"),
    )
