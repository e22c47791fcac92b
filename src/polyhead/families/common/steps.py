"""Steps from a file's tensor to polyhead's, each with its inverse.

A step turns one tensor of the file into one or more of polyhead's (``to_ours``) and back
(``to_theirs``). Steps return views where they can, so that memory-mapped files stay where they are.

Shape letters: H query heads, G kv heads, D head size, P rotated features, X experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from polyhead.config import LayerConfig, TransformerConfig

_LAYER = re.compile(r"(encoder_layers|layers)\.(\d+)\.(cross_attention)?")


@dataclass(frozen=True)
class At:
    """Where a tensor belongs.

    Attributes:
        config: Configuration of the model.
        name: polyhead's name of the tensor, or of the first that it becomes.
    """

    config: TransformerConfig
    name: str

    @cached_property
    def layer(self) -> LayerConfig:
        """The layer that the tensor is of; of the model's first layer where it is of none."""
        found = _LAYER.match(self.name)
        layers: Sequence[LayerConfig] = self.config.layers
        if found is None:
            return layers[0]
        if found[1] == "encoder_layers":
            layers = self.config.encoder_layers
        return layers[min(int(found[2]), len(layers) - 1)]

    @property
    def attention(self) -> Any:
        """The attention that the tensor is of."""
        cross = ".cross_attention." in self.name
        return self.layer.cross_attention if cross else self.layer.attention

    @property
    def experts(self) -> int:
        """X of the network that the tensor is of; 0 where that is a single one."""
        beside = ".shortcut." in self.name
        network = self.layer.shortcut if beside else self.layer.feed_forward
        return int(getattr(network, "num_experts", 0))


class Step(Protocol):
    """One change and its inverse.

    Attributes:
        moves_rows: Whether rows (the last dimension) only change places, whatever they hold.
    """

    @property
    def moves_rows(self) -> bool: ...

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        """What one tensor of the file becomes."""
        ...

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        """The tensor of the file."""
        ...

    def count(self, at: At) -> int:
        """How many tensors one becomes."""
        ...


@dataclass(frozen=True)
class OneToOne:
    """A step that changes one tensor into one."""

    moves_rows: ClassVar[bool] = False

    def count(self, at: At) -> int:
        return 1

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return (self.changed(tensor, at),)

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        return self.restored(tensors[0], at)

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        raise NotImplementedError

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Transposed(OneToOne):
    """The last two dimensions change places: ``[in, out]`` weights (``Conv1D``). Biases stay."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.mT if tensor.ndim > 1 else tensor

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return self.changed(tensor, at)


@dataclass(frozen=True)
class Plus(OneToOne):
    """Adds a number: for files that store a norm's weight minus 1."""

    number: float

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor + self.number

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor - self.number


@dataclass(frozen=True)
class Shaped(OneToOne):
    """Dimensions of size 1 that the file has and polyhead has not: ``[R, 1]`` as ``[R]``.

    Attributes:
        ours: polyhead's number of dimensions; those dropped are of size 1.
        theirs: Where the file has a dimension of size 1, counted in its own shape.
    """

    theirs: tuple[int, ...]

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.squeeze(self.theirs)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        for place in sorted(self.theirs):
            tensor = tensor.unsqueeze(place)
        return tensor


@dataclass(frozen=True)
class AsRow(OneToOne):
    """One row as a matrix, where the file may hold it as a vector."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.reshape(1, -1) if tensor.ndim == 1 else tensor

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor


@dataclass(frozen=True)
class RotaryPairs(OneToOne):
    """Rows of each head stand in rotary pairs (2i, 2i + 1); polyhead turns (i, i + P/2).

    Weights, biases and the weights of norms, of queries and keys. The number of heads is that of
    the rows over the head size, the number of rotated features the rotary embedding's.

    Attributes:
        last: The rotated features are a head's last, not its first.
    """

    last: bool = False
    moves_rows: ClassVar[bool] = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return self._reordered(tensor, at, to_ours=True)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return self._reordered(tensor, at, to_ours=False)

    def _reordered(self, tensor: Tensor, at: At, *, to_ours: bool) -> Tensor:
        attention = at.attention
        if attention.rope is None:
            return tensor
        size, rotated = self._sizes(attention)
        if not size or tensor.shape[0] % size:
            return tensor  # misshapen: reported by its name when the state is checked
        rows = tensor.reshape(-1, size, *tensor.shape[1:])
        start = size - rotated if self.last else 0
        pairs = torch.arange(start, start + rotated, device="cpu")
        order = (pairs.view(-1, 2) if to_ours else pairs.view(2, -1)).T.flatten()
        whole = torch.arange(size, device="cpu")
        whole[start : start + rotated] = order
        return rows[:, whole].reshape(tensor.shape)

    def _sizes(self, attention: Any) -> tuple[int, int]:
        """Rows that belong together, and how many of them are rotated."""
        return attention.head_dim, attention.rope.dim or attention.head_dim


@dataclass(frozen=True)
class Pieces:
    """Base of the steps that cut a tensor into several."""

    moves_rows: ClassVar[bool] = False

    def count(self, at: At) -> int:
        raise NotImplementedError

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        raise NotImplementedError

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        return torch.cat(tuple(tensors))


@dataclass(frozen=True)
class Rows(Pieces):
    """Cut into ``pieces`` of equally many rows: gate and up of one matrix."""

    moves_rows: ClassVar[bool] = True
    pieces: int = 2

    def count(self, at: At) -> int:
        return self.pieces

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return tensor.tensor_split(self.pieces)


@dataclass(frozen=True)
class QKVRows(Pieces):
    """Cut into the rows of all queries, all keys, all values."""

    moves_rows: ClassVar[bool] = True

    def count(self, at: At) -> int:
        return 3

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        a = at.attention
        values = a.num_kv_heads * (a.v_head_dim or a.head_dim)
        sizes = [a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, values]
        if tensor.shape[0] != sum(sizes):
            return tensor.tensor_split(3)  # misshapen: reported when the state is checked
        return torch.split(tensor, sizes)


@dataclass(frozen=True)
class QKVPerGroup(Pieces):
    """Cut rows that stand as ``[G, H/G + 2, D]``: the queries of a group, its key, its value.

    With as many kv heads as heads this is ``[H, 3, D]``, with one kv head it is ``QKVRows``.
    """

    moves_rows: ClassVar[bool] = True

    def count(self, at: At) -> int:
        return 3

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        a = at.attention
        each = a.num_heads // a.num_kv_heads
        if tensor.shape[0] != (a.num_heads + 2 * a.num_kv_heads) * a.head_dim:
            return tensor.tensor_split(3)
        rows = tensor.reshape(a.num_kv_heads, each + 2, a.head_dim, *tensor.shape[1:])
        return [part.flatten(0, 2) for part in (rows[:, :each], rows[:, each:-1], rows[:, -1:])]

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        a = at.attention
        parts = [t.reshape(a.num_kv_heads, -1, a.head_dim, *t.shape[1:]) for t in tensors]
        return torch.cat(parts, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class QKVOfStates(Pieces):
    """Cut into the rows of all queries, all keys, all values of a DeltaNet layer."""

    moves_rows: ClassVar[bool] = True

    def count(self, at: At) -> int:
        return 3

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        a = at.attention
        keys = a.num_key_heads * a.head_k_dim
        sizes = [keys, keys, a.num_heads * a.head_v_dim]
        if tensor.shape[0] != sum(sizes):
            return tensor.tensor_split(3)
        return torch.split(tensor, sizes)


@dataclass(frozen=True)
class Alternating(Pieces):
    """Cut rows that take turns: 0, 2, 4, ... and 1, 3, 5, ..."""

    moves_rows: ClassVar[bool] = True
    pieces: int = 2

    def count(self, at: At) -> int:
        return self.pieces

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return [tensor[start :: self.pieces] for start in range(self.pieces)]

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        return torch.stack(tuple(tensors), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class PerExpert(Pieces):
    """A tensor for every expert, which the file stacks as ``[X, ...]``."""

    moves_rows: ClassVar[bool] = True

    def count(self, at: At) -> int:
        return at.experts

    def to_ours(self, tensor: Tensor, at: At) -> Sequence[Tensor]:
        return tensor.unbind()

    def to_theirs(self, tensors: Sequence[Tensor], at: At) -> Tensor:
        return torch.stack(tuple(tensors))


@dataclass(frozen=True)
class Each:
    """Further steps for each of the pieces of the step before: queries and keys, but not values."""

    steps: Sequence[Sequence[Step]]

    def __init__(self, *steps: Sequence[Step]) -> None:
        object.__setattr__(self, "steps", steps)

    @property
    def moves_rows(self) -> bool:
        return all(step.moves_rows for steps in self.steps for step in steps)

    def all_to_ours(self, tensors: Sequence[Tensor], at: At) -> list[Tensor]:
        return [
            forward(steps, tensor, at)[0] for steps, tensor in zip(self.steps, tensors, strict=True)
        ]

    def all_to_theirs(self, tensors: Sequence[Tensor], at: At) -> list[Tensor]:
        return [
            backward(steps, [tensor], at) for steps, tensor in zip(self.steps, tensors, strict=True)
        ]


def forward(steps: Sequence[Step | Each], tensor: Tensor, at: At) -> list[Tensor]:
    """One tensor of the file through all steps."""
    tensors = [tensor]
    for step in steps:
        if isinstance(step, Each):
            tensors = step.all_to_ours(tensors, at)
        else:
            tensors = [made for each in tensors for made in step.to_ours(each, at)]
    return tensors


def backward(steps: Sequence[Step | Each], tensors: Sequence[Tensor], at: At) -> Tensor:
    """The inverse of ``forward``."""
    parts = list(tensors)
    for step in reversed(steps):
        if isinstance(step, Each):
            parts = step.all_to_theirs(parts, at)
            continue
        size = step.count(at)
        parts = [
            step.to_theirs(parts[start : start + size], at) for start in range(0, len(parts), size)
        ]
    return parts[0]
