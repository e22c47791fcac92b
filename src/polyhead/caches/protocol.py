"""The interface of every cache: ``SequenceCache``, and ``KeyValueCache`` of keys and values alone.

``append`` takes the keys and values of new tokens and returns a source of everything remembered,
ready for ``attention(q, source)``. A cache holds what it was given: rotary embedding has been
applied before. Nothing outside may know how the tokens lie in memory. If a cache cannot do
something, it raises a ValueError that says what it can do, and stays as it was before.

Rows of different lengths. Every batch row counts its own tokens. A new token at a position below 0
is padding: it is not remembered, wherever in the row it stands, and as a query it sees nothing
under ``Causal()``. So a batch that is padded on either side is appended with the positions that
``next_positions(real)`` gives, and every row attends exactly as it would alone.

Shape letters: B batch, G kv heads, T new tokens, S tokens held, D key size, V value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor

from polyhead.caches import files
from polyhead.semantics.sources import KeyValueSource

Counts = int | Sequence[int] | Tensor
"""A whole number for all batch rows, or one for each."""


class SequenceCache(ABC):
    """What one layer remembers of a batch of sequences, of whatever kinds."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Tokens of each batch row's sequence, those included that a window has forgotten."""

    @property
    def even(self) -> bool:
        """Whether all rows hold the same places; otherwise ``append`` and queries need positions.

        Rows of one length may hold other places if they were rolled back by different numbers: a
        window has forgotten more of one, or more of its old tokens are quantized.
        """
        lengths = self.lengths
        return len(lengths) < 2 or lengths.count(lengths[0]) == len(lengths)

    @property
    def length(self) -> int:
        """Tokens of the longest row; the position of the next one if all rows are equally long."""
        return max(self.lengths, default=0)

    def next_positions(self, real: Tensor) -> Tensor:
        """Positions for ``append`` of a batch with padding; −1 where a token is padding.

        Args:
            real: ``[B, T]`` bool, False for padding.

        Raises:
            ValueError: Not a bool tensor, or of another batch than the tokens held.
        """
        if real.dtype != torch.bool or real.ndim != 2:
            raise ValueError(
                f"real must be bool [B, T], True for tokens and False for padding: got "
                f"{real.dtype} of shape {list(real.shape)}"
            )
        held = self.lengths or [0] * real.shape[0]
        if len(held) != real.shape[0]:
            raise ValueError(f"real must have batch {len(held)}, as the cache: got {len(real)}")
        before = torch.tensor(held, device=real.device)[:, None]
        return torch.where(real, before + real.cumsum(dim=1) - 1, -1)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that fit in the allocated memory; an unbounded cache grows when needed."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of all tensors allocated; forks of a paged cache share theirs."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """The part of ``bytes`` that tokens use."""

    @property
    @abstractmethod
    def max_rollback(self) -> int:
        """Tokens that ``rollback`` can remove from every row now; removing all always works."""

    @abstractmethod
    def rollback(self, count: Counts) -> None:
        """Forgets the last ``count`` tokens of every row, or of each row its own number.

        Raises:
            ValueError: More than are held, or than a window or quantized groups can give back.
        """

    @abstractmethod
    def check_rollback(self, count: Counts) -> list[int]:
        """Tokens that ``rollback`` would remove from each row; raises its errors, changes
        nothing."""

    def crop(self, length: Counts) -> None:
        """Forgets all but the first ``length`` tokens; shorter rows do not change.

        Raises:
            ValueError: What ``rollback`` raises, or a negative length.
        """
        held = self.lengths
        wanted = per_row("length", length, len(held))
        self.rollback([max(0, have - keep) for have, keep in zip(held, wanted, strict=True)])

    @abstractmethod
    def fork(self) -> Self:
        """An independent cache with the same content; a paged one shares its pages."""

    @abstractmethod
    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was (beam search); the batch may grow or shrink.

        Raises:
            ValueError: A row that is not there, or none.
        """

    def check_rows(self, rows: Sequence[int] | Tensor) -> list[int]:
        """The rows of ``reorder`` as numbers; raises its errors, changes nothing."""
        chosen = per_row("rows", rows if isinstance(rows, Tensor) else [*rows], len(rows))
        if not chosen or max(chosen) >= len(self.lengths):
            raise ValueError(
                f"rows must name batch rows of the cache, which has {len(self.lengths)}: got "
                f"{chosen}"
            )
        return chosen

    @abstractmethod
    def reset(self) -> None:
        """Forgets all tokens; memory may be kept for the next ones."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """How this cache was constructed, and the shape of its tokens once it is known."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything held: tensors, and facts that JSON can hold, ``description`` among them."""

    @abstractmethod
    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None:
        """Restores what ``state`` of a cache with the same description returned."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything held to a safetensors file, whole or not at all."""
        files.write(path, "", [self])

    def load(self, path: str | PathLike[str], device: torch.device | str = "cpu") -> None:
        """Loads what ``save`` wrote from a cache with the same description.

        Args:
            path: File that ``save`` wrote.
            device: Where the tensors go.

        Raises:
            CheckpointError: Not such a file, or of a cache of another kind or shape: says which,
                and the cache is as it was.
        """
        files.read(path, "", [self], torch.device(device))


class KeyValueCache(SequenceCache):
    """The keys and values of one attention layer.

    Attributes:
        rotates_late: Whether ``append`` takes keys before rotary embedding, and queries and the
            keys of its source are rotated by ``places`` of their positions.
    """

    rotates_late: bool = False

    def places(self, positions: int | Tensor) -> int | Tensor:
        """Positions ``[B, S]`` counted without what was evicted, where ``rotates_late``."""
        return positions

    @abstractmethod
    def append(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> KeyValueSource:
        """Remembers the keys and values of T more tokens.

        Args:
            k: ``[B, G, T, D]``, any strides.
            v: ``[B, G, T, V]``, any strides.
            positions: ``[T]`` or ``[B, T]`` absolute positions below 2⁴⁰, below 0 for padding;
                default: they follow on from the tokens held, counted from 0.

        Returns:
            All keys and values held, and those that only the new queries still see; valid until
            the cache changes.

        Raises:
            ValueError: Batch, heads, sizes, dtype, device or positions do not fit what is held;
                the message names which, and the cache is as it was.
        """

    @abstractmethod
    def source(self) -> KeyValueSource:
        """All keys and values held. Raises ValueError if nothing has been appended."""

    @property
    def positions(self) -> Tensor:
        """``[S]`` or ``[B, S]`` positions of the tokens held, in the order of ``source()``."""
        source = self.source()
        return source.tokens.position_tensor(source.device)


def per_row(name: str, value: Counts, batch: int) -> list[int]:
    """One whole number per batch row.

    Raises:
        ValueError: Not one number or one per row, or one below 0.
    """
    numbers = value.reshape(-1).tolist() if isinstance(value, Tensor) else value
    numbers = [numbers] * batch if isinstance(numbers, int) else list(numbers)
    if len(numbers) == 1 < batch:
        numbers *= batch
    if len(numbers) != batch:
        raise ValueError(f"{name} must be one number or one per row of {batch}: got {value}")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{name} must be a whole number of at least 0: got {value}")
    return numbers
