"""Who may look at whom: typed mask expressions over absolute positions.

    Causal() & Window(4096)                 a sliding window
    Prefix(10) | Causal()                   a prefix seen by everyone (prefix LM)
    Causal() & Documents([5, 3, 8])         packed documents that do not see each other
    KeyLengths([7, 9])                      right-padded keys
    Keep(allowed) & ~Prefix(4)              an explicit tensor, and a complement

A mask is a predicate on (query, key), asked in tiles: ``visible`` draws one tile, ``classify`` says
from spans alone that a tile is empty (it is skipped), full (no mask is drawn) or mixed. Nothing is
ever materialised beyond a tile.

Shape letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from polyhead.semantics.tokens import Span, Tokens, distance, is_traced


class Visibility(enum.Enum):
    """What a tile of (query, key) pairs holds."""

    NONE = "none"
    SOME = "some"
    ALL = "all"

    def __invert__(self) -> Visibility:
        return {Visibility.NONE: Visibility.ALL, Visibility.ALL: Visibility.NONE}.get(self, self)


class Mask(ABC):
    """A mask expression; combine with ``&`` (both allow), ``|`` (either allows), ``~`` (not)."""

    @abstractmethod
    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        """True where the query may look at the key: bool, broadcasts to ``[B, H, T, S]``."""

    @abstractmethod
    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        """Whether none, some or all pairs are visible; SOME wherever that is not known."""

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises ValueError if this mask cannot belong to such a call."""

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _operand(other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask has no truth value; combine masks with & | ~, not with and, or, not"
        )


def _operand(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    if isinstance(other, Tensor):
        raise TypeError(bare_tensor_message("a tensor cannot be combined with a mask"))
    raise TypeError(f"a mask combines with another mask: got {type(other).__name__}")


def bare_tensor_message(what: str) -> str:
    """The sentence that answers a bare bool tensor, whose polarity nobody can know."""
    return (
        f"{what}: say what True means with polyhead.Keep(tensor) (True: may attend) or "
        "polyhead.Drop(tensor) (True: may not attend)"
    )


class And(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        # A side that allows all of the tile need not be drawn.
        if self.left.classify(q, k) is Visibility.ALL:
            return self.right.visible(q, k, device)
        if self.right.classify(q, k) is Visibility.ALL:
            return self.left.visible(q, k, device)
        return self.left.visible(q, k, device) & self.right.visible(q, k, device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        left = self.left.classify(q, k)
        if left is Visibility.NONE:
            return left
        right = self.right.classify(q, k)
        return right if left is Visibility.ALL or right is Visibility.NONE else left

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.left.check(batch, heads, queries, keys)
        self.right.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"{_inside(self.left, Or)} & {_inside(self.right, Or)}"


class Or(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return self.left.visible(q, k, device) | self.right.visible(q, k, device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        left = self.left.classify(q, k)
        if left is Visibility.ALL:
            return left
        right = self.right.classify(q, k)
        return right if left is Visibility.NONE or right is Visibility.ALL else left

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.left.check(batch, heads, queries, keys)
        self.right.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


class Not(Mask):
    def __init__(self, inner: Mask) -> None:
        self.inner = inner

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return ~self.inner.visible(q, k, device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return ~self.inner.classify(q, k)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.inner.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"~{_inside(self.inner, And, Or)}"


def _inside(mask: Mask, *looser: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, looser) else repr(mask)


class Causal(Mask):
    """A query sees keys at its own position and before: key position ≤ query position."""

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return distance(q, k, device) >= 0

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if q.span is None or k.span is None:
            return Visibility.SOME
        if k.span.low > q.span.high:
            return Visibility.NONE
        return Visibility.ALL if k.span.high <= q.span.low else Visibility.SOME

    def __repr__(self) -> str:
        return "Causal()"


class Window(Mask):
    """A query sees keys less than ``size`` positions back: query − key < size.

    With ``Causal()`` those are ``size`` keys including the query itself, the sense of Hugging
    Face's ``sliding_window`` (FlashAttention's ``window_size[0]`` is one less). ``ahead`` limits
    the other side of a mask that is not causal: key − query ≤ ahead.

    Raises:
        ValueError: ``size`` below 1 or ``ahead`` below 0.
    """

    def __init__(self, size: int, ahead: int | None = None) -> None:
        self.size = _whole("Window size", size, least=1)
        self.ahead = None if ahead is None else _whole("Window ahead", ahead, least=0)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        back = distance(q, k, device)
        inside = back < self.size
        return inside if self.ahead is None else inside & (back >= -self.ahead)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        if q.span is None or k.span is None:
            return Visibility.SOME
        nearest, farthest = q.span.low - k.span.high, q.span.high - k.span.low
        if nearest >= self.size or (self.ahead is not None and farthest < -self.ahead):
            return Visibility.NONE
        inside = farthest < self.size and (self.ahead is None or nearest >= -self.ahead)
        return Visibility.ALL if inside else Visibility.SOME

    def __repr__(self) -> str:
        return f"Window({self.size}{'' if self.ahead is None else f', ahead={self.ahead}'})"


class Prefix(Mask):
    """Every query sees the keys at positions below ``length`` (one for all, or one per batch row)."""

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        self.length = _PerRow("Prefix length", length)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return _columns(k.position_tensor(device)) < self.length.tensor(device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return _below(k.span, self.length.span)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.length.check(batch)

    def __repr__(self) -> str:
        return f"Prefix({self.length})"


class KeyLengths(Mask):
    """Only the first ``length`` keys of a batch row are real; the rest is padding on the right.

    Counts places, not positions: padding is about slots in memory.
    """

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        self.length = _PerRow("KeyLengths length", length)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return k.place_tensor(device)[None, None, None, :] < self.length.tensor(device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return _below(k.places, self.length.span)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.length.check(batch)

    def __repr__(self) -> str:
        return f"KeyLengths({self.length})"


class Documents(Mask):
    """Packed documents: a query sees the keys of its own document.

    Args:
        lengths: Tokens per document in the order of packing, one list for all batch rows or a list
            per row. They count places and must add up to the number of keys.

    Raises:
        ValueError: No documents, a length below 0, or (in a call) a sum that is not S.
    """

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        rows = lengths.tolist() if isinstance(lengths, Tensor) else [*lengths]
        if not rows:
            raise ValueError("Documents needs at least one length: got none")
        nested = isinstance(rows[0], Sequence)
        self.lengths: list[list[int]] = [
            [_whole("a Documents length", n, least=0) for n in row]
            for row in (rows if nested else [rows])
        ]
        self._ends = [list(accumulate(row)) for row in self.lengths]

    def positions(self) -> Tensor:
        """``[S]`` or ``[B, S]``: every document counts its own positions from 0.

        What rotary or learned positions need for packed documents to equal separate runs.
        """
        rows = [torch.cat([torch.arange(n) for n in row]) for row in self.lengths]
        return rows[0] if len(rows) == 1 else torch.stack(rows)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        ends = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row, device=device) for row in self._ends],
            batch_first=True,
            padding_value=torch.iinfo(torch.int64).max,
        )
        rows = len(self._ends)
        ids = [
            torch.searchsorted(
                ends, tokens.place_tensor(device).expand(rows, -1).contiguous(), right=True
            )
            for tokens in (q, k)
        ]
        return (ids[0][:, :, None] == ids[1][:, None, :])[:, None]

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        kinds = {self._classify_row(ends, q.places, k.places) for ends in self._ends}
        return kinds.pop() if len(kinds) == 1 else Visibility.SOME

    @staticmethod
    def _classify_row(ends: list[int], q: Span, k: Span) -> Visibility:
        q_first, q_last = bisect_right(ends, q.low), bisect_right(ends, q.high)
        k_first, k_last = bisect_right(ends, k.low), bisect_right(ends, k.high)
        if q_last < k_first or k_last < q_first:
            return Visibility.NONE
        return Visibility.ALL if q_first == q_last == k_first == k_last else Visibility.SOME

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if len(self.lengths) not in (1, batch):
            raise ValueError(
                f"Documents lists {len(self.lengths)} batch rows, the call has batch {batch}"
            )
        for row, ends in enumerate(self._ends):
            if ends[-1] != keys:
                raise ValueError(
                    f"Documents lengths must add up to the number of keys: row {row} adds up to "
                    f"{ends[-1]}, there are {keys} keys"
                )

    def __repr__(self) -> str:
        rows = [_short(row) for row in self.lengths]
        return f"Documents({rows[0] if len(rows) == 1 else '[' + ', '.join(rows) + ']'})"


class Keep(Mask):
    """An explicit mask: True where the query may attend.

    Args:
        allowed: bool, broadcasts to ``[B, H, T, S]``; rows and columns are the indexes of this
            call's q and k.

    Raises:
        TypeError: Not a bool tensor.
    """

    def __init__(self, allowed: Tensor) -> None:
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = (
                f"{allowed.dtype} tensor" if isinstance(allowed, Tensor) else type(allowed).__name__
            )
            raise TypeError(
                f"{type(self).__name__} takes a bool tensor: got a {got}; an additive float mask is a bias"
            )
        if not 1 <= allowed.ndim <= 4:
            raise ValueError(
                f"{type(self).__name__} takes 1 to 4 dimensions that broadcast to [B, H, T, S]: "
                f"got shape {list(allowed.shape)}"
            )
        self.allowed = allowed[(None,) * (4 - allowed.ndim)]

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return cut(self.allowed, q, k).to(device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return Visibility.SOME

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_broadcast(type(self).__name__, self.allowed, (batch, heads, queries, keys))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.allowed.shape)})"


class Drop(Keep):
    """An explicit mask of the other polarity: True where the query may NOT attend."""

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return ~super().visible(q, k, device)


def cut(tensor: Tensor, q: Tokens, k: Tokens) -> Tensor:
    """The tile of a 4-D tensor that broadcasts to ``[B, H, T, S]``."""
    if tensor.shape[-2] != 1:
        tensor = tensor[:, :, q.start : q.start + q.length]
    if tensor.shape[-1] != 1:
        tensor = tensor[..., k.start : k.start + k.length]
    return tensor


def check_broadcast(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless 4-D ``tensor`` broadcasts to ``shape``."""
    if any(have not in (1, want) for have, want in zip(tensor.shape, shape, strict=True)):
        raise ValueError(
            f"{name} must broadcast to [B, H, T, S] = {list(shape)}: got {list(tensor.shape)}"
        )


def _columns(positions: Tensor) -> Tensor:
    """Key positions ``[S]`` or ``[B, S]`` as ``[1 or B, 1, 1, S]``."""
    return positions.reshape(-1, 1, 1, positions.shape[-1])


def _below(keys: Span | None, bound: Span | None) -> Visibility:
    if keys is None or bound is None:
        return Visibility.SOME
    if keys.high < bound.low:
        return Visibility.ALL
    return Visibility.NONE if keys.low >= bound.high else Visibility.SOME


def _whole(name: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number: got {value!r}")
    number = value.__index__()
    if number < least:
        raise ValueError(f"{name} must be at least {least}: got {number}")
    return int(number)


def _short(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"[{shown}, … {len(numbers)} in all]" if len(numbers) > most else f"[{shown}]"


class _PerRow:
    """A whole number for all batch rows, or one for each."""

    def __init__(self, name: str, value: int | Sequence[int] | Tensor) -> None:
        self.name = name
        self.values: Tensor | list[int]
        self.span: Span | None = None
        if isinstance(value, Tensor):
            if value.ndim > 1 or value.dtype.is_floating_point or value.dtype == torch.bool:
                raise ValueError(
                    f"{name} must be a whole number or one per batch row, [B]: got {value.dtype} "
                    f"of shape {list(value.shape)}"
                )
            self.values = value.reshape(-1)
            if is_traced(value):
                return
            numbers = self.values.tolist()
        else:
            numbers = [*value] if isinstance(value, Sequence) else [value]
            self.values = numbers = [_whole(name, n, least=0) for n in numbers]
        if not numbers or min(numbers) < 0:
            raise ValueError(
                f"{name} must be at least 0, one number or one per batch row: got {value}"
            )
        self.span = Span(min(numbers), max(numbers))

    def tensor(self, device: torch.device) -> Tensor:
        """``[1 or B, 1, 1, 1]``."""
        values = torch.as_tensor(self.values, device=device)
        return values.reshape(-1, 1, 1, 1)

    def check(self, batch: int) -> None:
        if len(self.values) not in (1, batch):
            raise ValueError(
                f"{self.name} must be one number or one per batch row: got {len(self.values)} "
                f"for batch {batch}"
            )

    def __repr__(self) -> str:
        numbers = self.values if isinstance(self.values, list) else None
        if numbers is None:
            return "tensor" if self.span is None else f"{self.span.low}..{self.span.high}"
        return str(numbers[0]) if len(numbers) == 1 else _short(numbers)
