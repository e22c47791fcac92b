"""Rows of tokens as batches that ``Trainable`` takes.

    pairs       read and written, padded on the right; batches of similar length
    documents   packed into rows of one length, none of which sees or predicts another

A batch is a function of its number: always the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polyhead._utils.checks import check_int
from polyhead.errors import InputError
from polyhead.training.losses import IGNORED

_POOL = 50
"""Batches whose rows are sorted by length together: lengths in a batch are similar, batches still
random."""


@dataclass(frozen=True)
class Row:
    """A source and the target to learn.

    Attributes:
        read: Tokens of the source; of a decoder the text.
        written: Tokens of the target; empty for a decoder.
    """

    read: Sequence[int]
    written: Sequence[int] = ()

    def __len__(self) -> int:
        return max(len(self.read), len(self.written))


class PaddedPairs:
    """Makes a batch of pairs: also a ``data_collator`` for Hugging Face's trainers.

    Args:
        pad: The token that fills rows.
    """

    def __init__(self, pad: int) -> None:
        self.pad = check_int("pad", pad, least=0)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """``input_ids`` and its ``attention_mask`` ``[B, S]``, ``labels`` ``[B, T]``."""
        return {
            "input_ids": _padded([row.read for row in rows], self.pad),
            "attention_mask": _padded([[1] * len(row.read) for row in rows], 0),
            "labels": _padded([row.written for row in rows], IGNORED),
        }


@dataclass(frozen=True)
class Packed:
    """A row of tokens, and the lengths of the documents that it consists of."""

    ids: Sequence[int]
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)


def pack(documents: Sequence[Sequence[int]], length: int) -> list[Packed]:
    """Documents one after the other, cut into rows; the rest of a cut document is a new one.

    Args:
        documents: Token ids of each document.
        length: Tokens per row; the last row may be shorter.
    """
    check_int("length", length, least=2)
    rows: list[Packed] = []
    ids: list[int] = []
    lengths: list[int] = []
    for document in documents:
        rest = list(document)
        while rest:
            part, rest = rest[: length - len(ids)], rest[length - len(ids) :]
            ids += part
            lengths.append(len(part))
            if len(ids) == length:
                rows.append(Packed(ids, lengths))
                ids, lengths = [], []
    return [*rows, Packed(ids, lengths)] if ids else rows


class PackedDocuments:
    """Makes a batch of packed rows: also a ``data_collator`` for Hugging Face's trainers.

    Args:
        pad: The token that fills a shorter row, as a document of its own.
        positions: Whether each document counts its positions from 0, as models with absolute
            positions need. Rotary embeddings and biases by distance do not, and are faster
            without.
    """

    def __init__(self, pad: int = 0, *, positions: bool = True) -> None:
        self.pad, self.positions = check_int("pad", pad, least=0), positions

    def __call__(self, rows: Sequence[Packed]) -> dict[str, Tensor]:
        """``input_ids``, ``labels`` and ``position_ids`` ``[B, T]``, and ``document_lengths``.

        The first label of a document is −100: nothing before it predicts it.
        """
        ids = _padded([row.ids for row in rows], self.pad)
        labels = _padded([row.ids for row in rows], IGNORED)
        places = torch.zeros_like(ids)
        lengths = []
        for row, packed in enumerate(rows):
            rest = ids.shape[1] - len(packed)
            lengths.append([*packed.lengths, rest] if rest else [*packed.lengths])
            first = 0
            for length in lengths[-1]:
                labels[row, first] = IGNORED
                places[row, first : first + length] = torch.arange(length, device="cpu")
                first += length
        made = {"input_ids": ids, "labels": labels, "document_lengths": _padded(lengths, 0)}
        return made | ({"position_ids": places} if self.positions else {})


class Batches:
    """Batches of rows, epoch after epoch, each in another order.

    Args:
        rows: Objects with a length, in tokens.
        collate: Makes a batch from a list of rows.
        tokens: Largest number of tokens per batch, padding included; a longer row is a batch alone.
        seed: Seed of the order of rows.

    Raises:
        InputError: ``rows`` is empty.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        tokens: int,
        seed: int = 0,
    ) -> None:
        if not rows:
            raise InputError("there is nothing to train on: no rows")
        self.rows, self.collate = rows, collate
        self.tokens, self.seed = check_int("tokens", tokens, least=1), seed
        self._ends: list[int] = []
        self._plan: tuple[int, list[list[int]]] = (-1, [])

    def __call__(self, number: int) -> dict[str, Tensor]:
        """The batch of a number from 0."""
        epoch = next((i for i, end in enumerate(self._ends) if number < end), len(self._ends))
        while epoch == len(self._ends):
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + len(self._planned(epoch)))
            epoch += number >= self._ends[-1]
        first = self._ends[epoch - 1] if epoch else 0
        return self.collate([self.rows[i] for i in self._planned(epoch)[number - first]])

    def epoch(self) -> list[dict[str, Tensor]]:
        """All rows once, in order of length: what a validation needs."""
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i]))
        return [self.collate([self.rows[i] for i in part]) for part in self._cut(order)]

    def _planned(self, epoch: int) -> list[list[int]]:
        if self._plan[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.rows), generator=generator, device="cpu").tolist()
            longest = max(len(self.rows[i]) for i in order[:1000])
            pool = max(1, _POOL * self.tokens // max(longest, 1))
            parts: list[list[int]] = []
            for start in range(0, len(order), pool):
                near = sorted(order[start : start + pool], key=lambda i: len(self.rows[i]))
                parts += self._cut(near)
            mixed = torch.randperm(len(parts), generator=generator, device="cpu").tolist()
            self._plan = (epoch, [parts[i] for i in mixed])
        return self._plan[1]

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        """Runs of rows that together have ``tokens`` tokens at most, padded to their longest."""
        parts: list[list[int]] = []
        longest = 0
        for i in order:
            longest = max(longest, len(self.rows[i]))
            if not parts or longest * (len(parts[-1]) + 1) > self.tokens:
                parts.append([])
                longest = len(self.rows[i])
            parts[-1].append(i)
        return parts


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.long, device="cpu") for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)
