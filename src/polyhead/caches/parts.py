"""Memories beside keys and values: a state, the tail of a convolution, pooled entries.

Each is a ``Part`` of a ``LayerCache``, which counts the tokens and says what happens to them; a
part holds tensors. Tokens come packed: the real ones of each row first, padding behind.

Shape letters: B batch, T new tokens, W width.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.caches.memory import Rows, empty
from polyhead.caches.sizes import Field, Store
from polyhead.config import Memory, Pooled, State, Tail, TokenIds


def dtype_of(memory: Memory, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a memory's numbers in a layer whose inputs have ``dtype``."""
    name = memory.dtype_name
    if name is None:
        return dtype
    found: torch.dtype = getattr(torch, name)
    return dtype if (found, dtype) == (torch.float32, torch.float64) else found


def store_of(memory: Memory, dtype: torch.dtype) -> Store:
    """The store of a memory that grows by units."""
    field = Field(memory.name, 1, memory.unit_elements, dtype_of(memory, dtype))
    return Store(memory.name, memory.unit_tokens, (field,))


def memory_bytes(
    memory: Memory, *, tokens: int, batch_size: int, dtype: torch.dtype, spare: int = 0
) -> int:
    """Bytes allocated for a memory that is no keys and values.

    Args:
        memory: A state, a tail or pooled entries.
        tokens: Tokens of each row.
        batch_size: Number of rows.
        dtype: Dtype of the layer's inputs.
        spare: As of ``LayerCache``.
    """
    total = batch_size * memory.row_elements(spare) * dtype_of(memory, dtype).itemsize
    if memory.unit_elements:
        total += store_of(memory, dtype).bytes(tokens // memory.unit_tokens, batch_size)
    return total


def read_bytes(memory: Memory, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of one row that a decode step reads: no spare ones."""
    grown = tokens // memory.unit_tokens * memory.unit_elements
    return (memory.read_elements + grown) * dtype_of(memory, dtype).itemsize


class Part(ABC):
    """The tensors of one memory, and how far it can go back."""

    bounded = True
    """Whether there are lengths that a row cannot go back to."""

    @abstractmethod
    def start(self, batch: int, like: Tensor) -> None:
        """Makes room for a batch of empty rows, with dtype and device of the layer's inputs."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that is allocated."""

    @abstractmethod
    def reaches(self, row: int, length: int) -> bool:
        """Whether a row can go back to ``length`` tokens, above 0."""

    @abstractmethod
    def cut(self, row: int, length: int, target: int) -> None:
        """Takes a row of ``length`` tokens back to ``target``."""

    @abstractmethod
    def before(self) -> Any:
        """What ``undo`` needs; cheap."""

    @abstractmethod
    def undo(self, before: Any) -> None:
        """Makes the last call undone."""

    @abstractmethod
    def reorder(self, rows: list[int]) -> None:
        """Row i becomes what row ``rows[i]`` was."""

    @abstractmethod
    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts for a file."""

    @abstractmethod
    def load(
        self, tensor: Tensor, facts: Mapping[str, Any], lengths: list[int], device: torch.device
    ) -> None:
        """Takes over what ``save`` gave; raises ValueError where it does not fit."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent part with the same content."""


class StatePart(Part):
    """``[slots, B, *shape]``: the state now, and states at earlier lengths (marks).

    A call gets a copy in another slot, which it updates in place. So an undone call costs nothing.
    """

    def __init__(self, memory: State, spare: int) -> None:
        self.memory, self.slots = memory, 2 + spare
        self.at = 0
        self.tensor: Tensor | None = None
        self.marks: list[list[int]] = []

    def start(self, batch: int, like: Tensor) -> None:
        shape = (self.slots, batch, *self.memory.shape)
        self.tensor = _zeros(shape, dtype_of(self.memory, like.dtype), like.device)
        self.at = 0
        self.marks = [[0] * batch, *([-1] * batch for _ in range(self.slots - 1))]

    def advance(self, lengths: list[int]) -> Tensor:
        """``[B, *shape]`` a copy of the state, which will stand for rows of ``lengths`` tokens."""
        if self.tensor is None:
            raise ValueError(f"memory {self.memory.name!r} has no rows yet")
        new = (self.at + 1) % self.slots
        self.tensor[new].copy_(self.tensor[self.at])
        self.at, self.marks[new] = new, [*lengths]
        return self.tensor[new]

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def reaches(self, row: int, length: int) -> bool:
        return any(mark[row] == length for mark in self.marks)

    def cut(self, row: int, length: int, target: int) -> None:
        if self.tensor is None:
            return
        found = [slot for slot, mark in enumerate(self.marks) if mark[row] == target]
        if not target:
            self.tensor[self.at, row].zero_()
        elif found[0] != self.at:
            self.tensor[self.at, row].copy_(self.tensor[found[0], row])
        for slot, mark in enumerate(self.marks):
            if slot != self.at and (mark[row] >= target or not target):
                mark[row] = -1
        self.marks[self.at][row] = target

    def before(self) -> Any:
        return self.at, [[*mark] for mark in self.marks]

    def undo(self, before: Any) -> None:
        at, marks = before
        while self.at != at:  # these slots have been overwritten
            marks[self.at] = [-1] * len(marks[self.at])
            self.at = (self.at - 1) % self.slots
        self.marks = marks

    def reorder(self, rows: list[int]) -> None:
        if self.tensor is not None:
            self.tensor = _selected(self.tensor, 1, rows)
            self.marks = [[mark[row] for row in rows] for mark in self.marks]

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        held = {} if self.tensor is None else {"state": self.tensor[self.at].contiguous()}
        return held, {}

    def load(
        self, tensor: Tensor, facts: Mapping[str, Any], lengths: list[int], device: torch.device
    ) -> None:
        _check(self.memory.name, tensor, (len(lengths), *self.memory.shape))
        if tensor.dtype != dtype_of(self.memory, tensor.dtype):
            raise ValueError(f"{self.memory.name} must be {self.memory.dtype}: got {tensor.dtype}")
        self.start(len(lengths), tensor.to(device))
        if self.tensor is not None:
            self.tensor[self.at].copy_(tensor)
        self.marks[self.at] = [*lengths]

    def fork(self) -> Self:
        other = copy.copy(self)
        other.tensor = None if self.tensor is None else _cloned(self.tensor)
        other.marks = [[*mark] for mark in self.marks]
        return other


class TailPart(Part):
    """``[B, tokens + 1 + spare, W]``: the last inputs of every row, the newest last."""

    def __init__(self, memory: Tail, spare: int) -> None:
        self.memory, self.keep = memory, memory.tokens + 1 + spare
        self.tensor: Tensor | None = None
        self.firsts: list[int] = []

    def start(self, batch: int, like: Tensor) -> None:
        shape = (batch, self.keep, self.memory.width)
        self.tensor = _zeros(shape, dtype_of(self.memory, like.dtype), like.device)
        self.firsts = [0] * batch

    def push(self, x: Tensor, counts: list[int], before: list[int]) -> Tensor:
        """``[B, tokens + T, W]``: the last inputs, then the new ones ``[B, T, W]``, packed."""
        if self.tensor is None:
            raise ValueError(f"memory {self.memory.name!r} has no rows yet")
        _check(self.memory.name, x, (len(counts), x.shape[1], self.memory.width))
        if x.dtype != self.tensor.dtype or x.device != self.tensor.device:
            raise ValueError(
                f"memory {self.memory.name!r} holds {self.tensor.dtype} on {self.tensor.device}: "
                f"got {x.dtype} on {x.device}"
            )
        whole = torch.cat((self.tensor, x), dim=1)
        # A new tensor: the old one undoes the call.
        with torch.inference_mode(False), torch.no_grad():
            rows = [whole[row, n : n + self.keep] for row, n in enumerate(counts)]
            self.tensor = torch.stack(rows)
        self.firsts = [
            max(first, n + count - self.keep)
            for first, n, count in zip(self.firsts, before, counts, strict=True)
        ]
        return whole[:, self.keep - self.memory.tokens :]

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def reaches(self, row: int, length: int) -> bool:
        first = self.firsts[row]
        return not first or length - self.memory.tokens >= first

    def cut(self, row: int, length: int, target: int) -> None:
        if self.tensor is None:
            return
        back = min(length - target, self.keep)
        held = self.tensor[row, : self.keep - back].clone()
        self.tensor[row, back:] = held
        self.tensor[row, :back] = 0
        if not target:
            self.tensor[row] = 0
            self.firsts[row] = 0

    def before(self) -> Any:
        return self.tensor, self.firsts

    def undo(self, before: Any) -> None:
        self.tensor, self.firsts = before

    def reorder(self, rows: list[int]) -> None:
        if self.tensor is not None:
            self.tensor = _selected(self.tensor, 0, rows)
            self.firsts = [self.firsts[row] for row in rows]

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        held = {} if self.tensor is None else {"tail": self.tensor.contiguous()}
        return held, {"firsts": self.firsts}

    def load(
        self, tensor: Tensor, facts: Mapping[str, Any], lengths: list[int], device: torch.device
    ) -> None:
        _check(self.memory.name, tensor, (len(lengths), self.keep, self.memory.width))
        firsts = [check_int("firsts", first, least=0) for first in facts["firsts"]]
        wanted = [max(0, length - self.keep) for length in lengths]
        if len(firsts) != len(lengths) or any(
            first < least for first, least in zip(firsts, wanted, strict=True)
        ):
            raise ValueError(f"{self.memory.name} cannot begin at {firsts}")
        self.start(len(lengths), tensor.to(device))
        if self.tensor is not None:
            self.tensor.copy_(tensor)
        self.firsts = firsts

    def fork(self) -> Self:
        other = copy.copy(self)
        other.tensor = None if self.tensor is None else _cloned(self.tensor)
        other.firsts = [*self.firsts]
        return other


class PooledPart(Part):
    """An entry for each ``every`` whole tokens of a row, in rows that grow."""

    bounded = False

    def __init__(self, memory: Pooled, spare: int) -> None:
        self.memory = memory
        self.rows: Rows | None = None

    def start(self, batch: int, like: Tensor) -> None:
        self.rows = Rows(store_of(self.memory, like.dtype), batch, like.device)

    def write(self, entries: Tensor, counts: list[int], before: list[int]) -> Tensor:
        """``[B, N, W]``: all entries, of which ``[B, n, W]`` are new; a row takes its first few."""
        if self.rows is None:
            raise ValueError(f"memory {self.memory.name!r} has no rows yet")
        every, name = self.memory.every, self.memory.name
        new = [(n + count) // every - n // every for n, count in zip(before, counts, strict=True)]
        _check(name, entries, (len(counts), max(new), self.memory.width))
        held = self.rows.tensors[0]
        if entries.dtype != held.dtype or entries.device != held.device:
            raise ValueError(
                f"memory {name!r} holds {held.dtype} on {held.device}: got {entries.dtype} on "
                f"{entries.device}"
            )
        if len({*new}) == 1 and len({*self.rows.stops}) == 1:
            if new[0]:
                self.rows.write(None, [entries[:, None]])
        else:
            for row, count in enumerate(new):
                if count:
                    self.rows.write([row], [entries[row : row + 1, None, :count]])
        (found,) = self.rows.read(0, self.rows.extent)
        return found[:, 0]

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self.rows is None else self.rows.tensors

    def reaches(self, row: int, length: int) -> bool:
        return True

    def cut(self, row: int, length: int, target: int) -> None:
        if self.rows is not None:
            self.rows.cut(row, target // self.memory.every)

    def before(self) -> Any:
        return None if self.rows is None else [*self.rows.stops]

    def undo(self, before: Any) -> None:
        for row, stop in enumerate(before or ()):
            if self.rows is not None:
                self.rows.cut(row, stop)

    def reorder(self, rows: list[int]) -> None:
        if self.rows is not None:
            self.rows.reorder(rows)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.rows is None:
            return {}, {}
        (found,) = self.rows.read(0, self.rows.extent)
        nowhere = (self.rows.units(0, self.rows.extent) < 0).to(found.device)
        return {"entries": found[:, 0].masked_fill(nowhere[..., None], 0).contiguous()}, {}

    def load(
        self, tensor: Tensor, facts: Mapping[str, Any], lengths: list[int], device: torch.device
    ) -> None:
        stops = [length // self.memory.every for length in lengths]
        _check(self.memory.name, tensor, (len(lengths), max(stops), self.memory.width))
        self.start(len(lengths), tensor.to(device))
        if self.rows is not None:
            self.rows.restore([tensor[:, None]], stops, [0] * len(stops))

    def fork(self) -> Self:
        other = copy.copy(self)
        other.rows = None if self.rows is None else self.rows.fork()
        return other


def part_of(memory: Memory, spare: int) -> Part:
    """The part that holds a memory; raises TypeError for a kind that has none."""
    made = _PARTS.get(type(memory))
    if made is None:
        raise TypeError(
            f"a cache holds {', '.join(kind.__name__ for kind in _PARTS)} and PerToken: got "
            f"{memory}"
        )
    part: Part = made(memory, spare)
    return part


_PARTS: dict[type[Memory], Any] = {
    State: StatePart,
    Tail: TailPart,
    TokenIds: TailPart,
    Pooled: PooledPart,
}


def _check(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"memory {name!r} must get {list(shape)}: got {list(tensor.shape)}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return empty(shape, dtype, device).zero_() if prod(shape) else empty(shape, dtype, device)


def _cloned(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def _selected(tensor: Tensor, dim: int, rows: list[int]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.index_select(dim, torch.tensor(rows, device=tensor.device))
