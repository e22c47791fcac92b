"""Layers that remember a state in GGUF files: their settings, and what the converter does to their
tensors (``conversion/mamba.py`` and ``conversion/qwen.py`` of ggml-org/llama.cpp).

Shape letters: H heads, K key heads, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.steps import At, Each, OneToOne, Shaped, Step

ALONE: Mapping[str, str | None] = {
    "context_length": ".context",
    "attention.head_count": ".heads",
    "attention.key_length": ".key_length",
    "feed_forward_length": ".hidden",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
"""Settings of models whose layers are a mixer alone; the first four are there for form's sake."""
NOTHING_ELSE: Mapping[str, int] = {
    "context_length": 1 << 20,
    "attention.head_count": 0,
    "feed_forward_length": 0,
}
"""What the converter writes there."""
MAMBA2: Mapping[str, str | None] = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.inner_size": ".inner",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
}
"""Settings of Mamba-2."""
KV_HEADS: Mapping[str, str | None] = {"attention.head_count_kv": ".kv_heads"}
"""A list in files of hybrids, whose layers without kv heads remember a state."""


def attends(values: Mapping[str, Any]) -> list[bool]:
    """Which layers have heads that keep keys and values, from ``KV_HEADS``."""
    return [bool(each) for each in by_layer(values, ".kv_heads")]


def by_layer(values: Mapping[str, Any], key: str) -> list[Any]:
    """A setting of every layer; files give it once where it is the same for all."""
    found = values.get(key, 0)
    return found if isinstance(found, list) else [found] * values["num_hidden_layers"]


def kv_heads(values: Mapping[str, Any]) -> dict[str, int]:
    """The number of kv heads of the layers that have them, from ``KV_HEADS``."""
    heads = values.get(".kv_heads", 0)
    most = max(heads) if isinstance(heads, list) else heads
    return {"num_key_value_heads": most} if most else {}


def kv_heads_of(config: TransformerConfig) -> dict[str, list[int]]:
    """The setting of ``KV_HEADS``."""
    found: list[Any] = [layer.attention for layer in config.layers]
    keeps = [any(memory.keys_and_values for memory in each.memories) for each in found]
    heads = [each.num_kv_heads if kept else 0 for each, kept in zip(found, keeps, strict=True)]
    return {"attention.head_count_kv": heads}


def divided(values: Mapping[str, Any], key: str, setting: str) -> int:
    """``ssm.inner_size`` over what ``key`` says.

    Raises:
        ConfigError: It is no multiple of that; ``setting`` names it.
    """
    inner, count = values.get(".inner", 0), values.get(key, 0)
    if not inner or not count or inner % count:
        raise ConfigError(f"ssm.inner_size must be a multiple of {setting}: got {inner}, {count}")
    return int(inner // count)


def mamba2_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from the sizes of ``MAMBA2``, and whether convolutions have biases."""
    return {
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in values[".tensors"]),
        "mamba_d_head": divided(values, "mamba_n_heads", "ssm.time_step_rank"),
    }


def mamba2_alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same where all heads' values are a multiple of the stream's."""
    expand = divided(values, "hidden_size", "embedding_length")
    return {**mamba2_values(values), "mamba_expand": expand}


def mamba2_size(config: TransformerConfig) -> dict[str, int]:
    """The setting of all heads' values."""
    found: list[Any] = [getattr(each.attention, "mamba", each.attention) for each in config.layers]
    state = next(each for each in found if each.kind == "mamba2")
    return {"ssm.inner_size": state.num_heads * state.head_dim}


@dataclass(frozen=True)
class Rates(OneToOne):
    """The file has ``-exp(A_log)``."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        if bool((tensor > 0).any()):
            raise ValueError("numbers that states decay by must not be above 0")
        return (-tensor).log()

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return -tensor.exp()


@dataclass(frozen=True)
class PerGroup(OneToOne):
    """The file has a row for each group of a norm, ``[G, W/G]``."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.flatten()

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.reshape(getattr(at.attention, "mamba", at.attention).num_groups, -1)


@dataclass(frozen=True)
class Flat(Shaped):
    """A vector, to which the converter gives dimensions that ``llama-quantize`` may drop."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.flatten()


@dataclass(frozen=True)
class Tiled(OneToOne):
    """Value heads stand as ``[H/K, K]`` in the file: the first of each key head, then the second.

    polyhead has them as ``[K, H/K]``, those of a key head together.

    Attributes:
        behind_keys: The rows of all queries and keys come before them, and stay.
    """

    behind_keys: bool = False
    dim: ClassVar[int] = 0
    moves_rows: ClassVar[bool] = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        keys = at.attention.num_key_heads
        return self._moved(tensor, at, (at.attention.num_heads // keys, keys))

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        keys = at.attention.num_key_heads
        return self._moved(tensor, at, (keys, at.attention.num_heads // keys))

    def _moved(self, tensor: Tensor, at: At, standing: tuple[int, int]) -> Tensor:
        a = at.attention
        first = 2 * a.num_key_heads * a.head_k_dim if self.behind_keys else 0
        heads = tensor[first:]
        if not heads.shape[self.dim] or heads.shape[self.dim] % a.num_heads:
            return tensor  # misshapen: reported by its name when the state is checked
        shape = (*heads.shape[: self.dim], *standing, -1, *heads.shape[self.dim + 1 :])
        apart = heads.reshape(shape).transpose(self.dim, self.dim + 1)
        moved = apart.flatten(self.dim, self.dim + 2)
        return torch.cat([tensor[:first], moved]) if first else moved


@dataclass(frozen=True)
class TiledColumns(Tiled):
    """Columns stand so."""

    dim: ClassVar[int] = 1
    moves_rows: ClassVar[bool] = False


def mamba_steps(theirs: str) -> dict[str, tuple[Step | Each, ...]]:
    """What is left to do for tensors of Mamba; the converter drops the convolution's dimension."""
    return {theirs + "A_log": (Rates(),), theirs + "conv1d.weight": ()}


def mamba2_steps(theirs: str) -> dict[str, tuple[Step | Each, ...]]:
    """The same of Mamba-2, whose numbers of heads are columns."""
    return {
        theirs + "A_log": (Shaped((1,)), Rates()),
        theirs + "D": (Shaped((1,)),),
        theirs + "norm": (PerGroup(),),
        theirs + "conv1d.weight": (),
    }


def mamba2_names(theirs: str) -> dict[str, str]:
    """A name that the package's map does not know."""
    return {theirs + "dt_bias": "blk.{i}.ssm_dt.bias"}
