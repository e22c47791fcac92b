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

from polyhead.families.common.steps import At, Each, OneToOne, Shaped, Step

KV_HEADS: Mapping[str, str | None] = {"attention.head_count_kv": ".kv_heads"}
"""A list in files of hybrids, whose layers without kv heads remember a state."""


def attends(values: Mapping[str, Any]) -> list[bool]:
    """Which layers have heads that keep keys and values, from ``KV_HEADS``."""
    heads = values.get(".kv_heads", 0)
    listed = heads if isinstance(heads, list) else [heads] * values["num_hidden_layers"]
    return [bool(each) for each in listed]


def kv_heads(values: Mapping[str, Any]) -> dict[str, int]:
    """The number of kv heads of the layers that have them, from ``KV_HEADS``."""
    heads = values.get(".kv_heads", 0)
    most = max(heads) if isinstance(heads, list) else heads
    return {"num_key_value_heads": most} if most else {}


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
        apart = heads.unflatten(self.dim, (*standing, -1)).transpose(self.dim, self.dim + 1)
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
