"""The interface of masks, and how two are combined.

    allowed(a & b) = allowed(a) ∧ allowed(b)     allowed(a | b) = allowed(a) ∨ allowed(b)     ~a

A mask is a predicate on (query, key), its ``rule``, asked in tiles: ``visible`` draws one tile,
``classify`` says from spans alone that a tile is empty (it is skipped), full (no mask is drawn) or
mixed. Nothing is ever materialised beyond a tile.

Shape letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.semantics.component import Component, inherit_no_shortcut
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs, Tile
from polyhead.semantics.tokens import Tokens


class Visibility(enum.Enum):
    """What a tile of (query, key) pairs holds."""

    NONE = "none"
    SOME = "some"
    ALL = "all"

    def __invert__(self) -> Visibility:
        return {Visibility.NONE: Visibility.ALL, Visibility.ALL: Visibility.NONE}.get(self, self)


class Selection(NamedTuple):
    """Lists of blocks of keys: key i of the call is in block i // size.

    Attributes:
        blocks: ``[1 or B, n, lists or 1, m]`` whole numbers, for each H / n neighbouring heads;
            those that are negative or behind the last key hold no key.
        size: Keys of a block.
        queries: Queries that share a list, one after another.
        skipped: Queries of the first list that come before those of the call.
    """

    blocks: Tensor
    size: int
    queries: int = 1
    skipped: int = 0


class Range(NamedTuple):
    """What each query may see: the keys at positions low ≤ position < high that ``keep`` allows.

    Attributes:
        low: ``[1 or B, T]`` int64; None: unlimited.
        high: ``[1 or B, T]`` int64, exclusive; None: unlimited.
        keep: An explicit tensor, bool, broadcasts to ``[B, H, T, S]``; None hides nothing.
        chosen: The keys that queries see alone; None: all of the range.
    """

    low: Tensor | None
    high: Tensor | None
    keep: Tensor | None = None
    chosen: Selection | None = None


_DRAWN = 12
"""Queries and keys of a notebook's picture, where a mask is for any number of them."""


class Mask(Component):
    """A mask expression; combine with ``&`` (both allow), ``|`` (either allows), ``~`` (not).

    Your own mask defines ``rule``, or ``visible`` if it has none. It may override other methods
    with faster ones. Define ``arguments`` if files should store it.

    Attributes:
        compares: Which of its numbers decide about a token: its position, its place, or its index
            in the call.
    """

    compares: Literal["positions", "places", "indexes"] = "positions"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherit_no_shortcut(cls, Mask, "visible", "classify", "range", "is_causal", "simplify")

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        """Whether the query of a pair may look at its key."""
        raise NotImplementedError(f"{type(self).__name__} must define rule or visible")

    def has_rule(self) -> bool:
        """Whether this mask is a function of one pair, as are all that it is made of."""
        return all(part.uses_rule for part in self.walk())

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        """True where the query may look at the key: bool, broadcasts to ``[B, H, T, S]``."""
        drawn: Tensor = self.rule(Tile(q, k, device))(())
        return drawn

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        """Whether none, some or all pairs are visible; SOME wherever that is not known."""
        return Visibility.SOME

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range | None:
        """What each query sees as one range of key positions and an explicit tensor, if it is that.

        None where it is not: such a mask would have to be drawn for all pairs.
        """
        return None

    def is_causal(self) -> bool:
        """Whether no query sees a key that stands later; False where that is not known."""
        return False

    def parts(self) -> tuple[Mask, ...]:
        """The masks that this one is made of."""
        return ()

    def made_for(self) -> tuple[int, int] | None:
        """Queries and keys of the calls that this mask is for; None: of any."""
        sizes = (part.made_for() for part in self.parts())
        return next((size for size in sizes if size is not None), None)

    def _repr_html_(self) -> str:
        """What a notebook shows: the mask's expression, and a picture where one can be drawn."""
        from polyhead._utils.notebook import panel, picture
        from polyhead.semantics.drawing import draw_mask

        try:
            drawn = picture(draw_mask(self, *(self.made_for() or (_DRAWN, _DRAWN)), svg=True))
        except (ValueError, NotImplementedError):  # its required size is known only in a call
            drawn = ""
        return panel(repr(self), drawn)

    def walk(self) -> Iterator[Mask]:
        """This mask and all masks inside it."""
        yield self
        for part in self.parts():
            yield from part.walk()

    def of_heads(self, heads: Sequence[int]) -> Mask:
        """The mask of some query heads alone: what a head sees, where heads differ."""
        return self

    def of_tokens(self, queries: slice, keys: slice) -> Mask:
        """The mask of a call with some of the queries and keys of this mask's call.

        Raises:
            UnsupportedError: A mask of somebody's own class that reads indexes and does not define
                it.
        """
        if self.compares == "indexes":
            raise UnsupportedError(
                f"{type(self).__name__} does not say what its rows and columns are: define "
                "of_tokens(queries, keys), which returns the mask of those rows and columns"
            )
        return self

    def of_rows(self, rows: Sequence[int]) -> Mask:
        """The mask of a batch whose row i is row ``rows[i]`` of this one's (beam search).

        Raises:
            UnsupportedError: A mask of somebody's own class that does not define it.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not say what its batch rows are: define of_rows(rows), "
            "which returns the mask of a batch with those rows"
        )

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises ValueError if this mask cannot belong to such a call."""
        for part in self.parts():
            part.check(batch, heads, queries, keys)

    def simplify(self, q: Tokens, k: Tokens) -> Mask:
        """Drops sub-masks that are always true for these tokens."""
        return self

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
    if isinstance(other, type) and issubclass(other, Mask):
        raise TypeError(f"a mask combines with another mask: got the class; {called(other)}")
    raise TypeError(f"a mask combines with another mask: got {type(other).__name__}")


def called(kind: type) -> str:
    """A hint for a mask's class in place of an object."""
    return f"call it: {kind.__name__}()"


def bare_tensor_message(what: str) -> str:
    """The sentence that answers a bare bool tensor, whose polarity is unknown."""
    return (
        f"{what}: say what True means with polyhead.Keep(tensor) (True: may attend) or "
        "polyhead.Drop(tensor) (True: may not attend)"
    )


class And(Mask, arguments={"left": Mask, "right": Mask}):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        left, right = self.left.rule(of), self.right.rule(of)
        return lambda pair: left(pair) & right(pair)

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

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range | None:
        left, right = self.left.range(q, k, device), self.right.range(q, k, device)
        if left is None or right is None:
            return None
        if left.chosen is not None and right.chosen is not None:
            return None
        return Range(
            _either(torch.maximum, left.low, right.low),
            _either(torch.minimum, left.high, right.high),
            _either(torch.logical_and, left.keep, right.keep),
            right.chosen if left.chosen is None else left.chosen,
        )

    def is_causal(self) -> bool:
        return self.left.is_causal() or self.right.is_causal()

    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def simplify(self, q: Tokens, k: Tokens) -> Mask:
        if self.left.classify(q, k) is Visibility.ALL:
            return self.right.simplify(q, k)
        if self.right.classify(q, k) is Visibility.ALL:
            return self.left.simplify(q, k)
        return self.left.simplify(q, k) & self.right.simplify(q, k)

    def of_heads(self, heads: Sequence[int]) -> Mask:
        return self.left.of_heads(heads) & self.right.of_heads(heads)

    def of_tokens(self, queries: slice, keys: slice) -> Mask:
        return self.left.of_tokens(queries, keys) & self.right.of_tokens(queries, keys)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return self.left.of_rows(rows) & self.right.of_rows(rows)

    def __repr__(self) -> str:
        return f"{_inside(self.left, Or)} & {_inside(self.right, Or)}"


class Or(Mask, arguments={"left": Mask, "right": Mask}):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        left, right = self.left.rule(of), self.right.rule(of)
        return lambda pair: left(pair) | right(pair)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return self.left.visible(q, k, device) | self.right.visible(q, k, device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        left = self.left.classify(q, k)
        if left is Visibility.ALL:
            return left
        right = self.right.classify(q, k)
        return right if left is Visibility.NONE or right is Visibility.ALL else left

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range | None:
        left, right = self.left.range(q, k, device), self.right.range(q, k, device)
        # Two ranges from the beginning are one; others may leave a hole between them.
        if left is None or right is None or left.low is not None or right.low is not None:
            return None
        if any(side.keep is not None or side.chosen is not None for side in (left, right)):
            return None
        if left.high is None or right.high is None:
            return Range(None, None)
        return Range(None, torch.maximum(left.high, right.high))

    def is_causal(self) -> bool:
        return self.left.is_causal() and self.right.is_causal()

    def parts(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def simplify(self, q: Tokens, k: Tokens) -> Mask:
        if self.left.classify(q, k) is Visibility.NONE:
            return self.right.simplify(q, k)
        if self.right.classify(q, k) is Visibility.NONE:
            return self.left.simplify(q, k)
        return self.left.simplify(q, k) | self.right.simplify(q, k)

    def of_heads(self, heads: Sequence[int]) -> Mask:
        return self.left.of_heads(heads) | self.right.of_heads(heads)

    def of_tokens(self, queries: slice, keys: slice) -> Mask:
        return self.left.of_tokens(queries, keys) | self.right.of_tokens(queries, keys)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return self.left.of_rows(rows) | self.right.of_rows(rows)

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


class Not(Mask, arguments={"inner": Mask}):
    def __init__(self, inner: Mask) -> None:
        self.inner = inner

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        inner = self.inner.rule(of)
        return lambda pair: ~inner(pair)

    def visible(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        return ~self.inner.visible(q, k, device)

    def classify(self, q: Tokens, k: Tokens) -> Visibility:
        return ~self.inner.classify(q, k)

    def parts(self) -> tuple[Mask, ...]:
        return (self.inner,)

    def of_heads(self, heads: Sequence[int]) -> Mask:
        return ~self.inner.of_heads(heads)

    def of_tokens(self, queries: slice, keys: slice) -> Mask:
        return ~self.inner.of_tokens(queries, keys)

    def of_rows(self, rows: Sequence[int]) -> Mask:
        return ~self.inner.of_rows(rows)

    def __repr__(self) -> str:
        return f"~{_inside(self.inner, And, Or)}"


def _either(
    both: Callable[[Tensor, Tensor], Tensor], left: Tensor | None, right: Tensor | None
) -> Tensor | None:
    """The bound that is not None, or both combined."""
    if left is None or right is None:
        return left if right is None else right
    return both(left, right)


def _inside(mask: Mask, *looser: type[Mask]) -> str:
    return f"({mask!r})" if isinstance(mask, looser) else repr(mask)
