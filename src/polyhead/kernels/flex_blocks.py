"""Block masks of FlexAttention, built once per mask and tokens and kept.

Masks do not change once they are made, so two of the same classes and arguments are one mask. A
tensor inside counts by identity and version: the same tensor, not written to since.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.semantics import Mask, Tokens, Visibility
from polyhead.semantics.component import Component
from polyhead.semantics.masks.counts import PerRow
from polyhead.semantics.tokens import is_tracing

BLOCK = 128
"""Queries and keys of a block of the block mask, as FlexAttention's own default."""

KEPT = 64
"""Block masks that are kept; those used longest ago go first."""


class Blocks(NamedTuple):
    """Which key blocks every query block sees in part, and which whole.

    Attributes:
        some: How many in part, ``[1 or B, 1, blocks of q]`` int32.
        some_first: Their numbers first, ``[1 or B, 1, blocks of q, blocks of k]`` int32.
        full: How many whole.
        full_first: Their numbers first.
    """

    some: Tensor
    some_first: Tensor
    full: Tensor
    full_first: Tensor


class _Kept(NamedTuple):
    blocks: Blocks
    tensors: list[tuple[weakref.ref[Tensor], int]]


_kept: OrderedDict[Hashable, _Kept] = OrderedDict()
_lock = threading.Lock()


def blocks_of(mask: Mask, q: Tokens, k: Tokens, device: torch.device) -> Blocks:
    """The block mask of these tokens, kept from an earlier call or built."""
    if is_tracing():
        return _built(mask, q, k, device)
    tensors: list[Tensor] = []
    try:
        asked = mask, _value_of_tokens(q), _value_of_tokens(k), str(device), BLOCK
        key = _value_of(asked, tensors)
    except TypeError:
        return _built(mask, q, k, device)
    with _lock:
        found = _kept.pop(key, None)
        if found is None or not all(
            ref() is x and version == x._version
            for (ref, version), x in zip(found.tensors, tensors, strict=True)
        ):
            with torch.inference_mode(False):  # a later call may need gradients
                blocks = _built(mask, q, k, device)
            found = _Kept(blocks, [(weakref.ref(x), x._version) for x in tensors])
        _kept[key] = found
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    return found.blocks


def _value_of_tokens(tokens: Tokens) -> tuple[object, ...]:
    return tokens.length, tokens.start, tokens.shift, tokens.positions, tokens.stride


def _value_of(value: object, tensors: list[Tensor]) -> Hashable:
    """A key that equals another's where both stand for the same; its tensors go to ``tensors``.

    Raises:
        TypeError: A value that is not known to stay what it is.
    """
    if value is None or type(value) in (int, float, bool, str):
        return type(value), value
    if isinstance(value, Tensor):
        if value.is_inference():
            raise TypeError("a tensor without a version")
        # A view is made anew in every call; what it looks at is not.
        base = value if value._base is None else value._base
        tensors.append(base)
        return id(base), tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_value_of(entry, tensors) for entry in value)
    if isinstance(value, PerRow):
        return _value_of(value.values, tensors)
    if isinstance(value, Component) and value.arguments is not None:
        arguments = (_value_of(getattr(value, name), tensors) for name in value.arguments)
        return type(value), *arguments
    raise TypeError(f"{type(value).__name__} does not tell its arguments")


def _built(mask: Mask, q: Tokens, k: Tokens, device: torch.device) -> Blocks:
    some, full = _by_ranges(mask, q, k, device) or _one_by_one(mask, q, k, device)
    return Blocks(*_listed(some & ~full), *_listed(full))


def _listed(has: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are True, and their numbers first."""
    first = has.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return has.sum(dim=-1).int(), first.int()


def _by_ranges(
    mask: Mask, q: Tokens, k: Tokens, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Which blocks see anything and which everything, on the device; None if that is no range."""
    in_order = k.positions is None and k.stride == 1
    found = mask.range(q, k, device) if in_order else None
    if found is None or found.chosen is not None:
        return None
    ends = torch.iinfo(torch.int64)
    index = torch.arange(-(-q.length // BLOCK) * BLOCK, device=device).clamp(max=q.length - 1)

    def ends_of(bound: Tensor | None, otherwise: int) -> tuple[Tensor, Tensor]:
        """The least and the greatest bound of every query block, ``[1 or B, 1, blocks, 1]``."""
        if bound is None:
            bound = torch.full((1, q.length), otherwise, device=device)
        rows = bound[:, index].view(len(bound), 1, -1, BLOCK)
        return rows.amin(dim=-1, keepdim=True), rows.amax(dim=-1, keepdim=True)

    (low, low_most), (high_least, high) = (
        ends_of(found.low, ends.min),
        ends_of(found.high, ends.max),
    )
    starts = k.places.low + torch.arange(0, k.length, BLOCK, device=device)
    stops = starts + BLOCK
    some, full = (low < stops) & (high > starts), (low_most <= starts) & (high_least >= stops)
    return some, full & _inside(q.length, k.length, device) & (found.keep is None)


def _one_by_one(mask: Mask, q: Tokens, k: Tokens, device: torch.device) -> tuple[Tensor, Tensor]:
    """The same for any mask, a block at a time."""
    tiles = k.split(BLOCK)
    kinds = [[mask.classify(rows, tile) for tile in tiles] for rows in q.split(BLOCK)]

    def drawn(asked: Callable[[Visibility], bool]) -> Tensor:
        return torch.tensor([[asked(kind) for kind in row] for row in kinds], device=device)

    some = drawn(lambda kind: kind is not Visibility.NONE)[None, None]
    full = drawn(lambda kind: kind is Visibility.ALL)[None, None]
    return some, full & _inside(q.length, k.length, device)


def _inside(queries: int, keys: int, device: torch.device) -> Tensor:
    """``[blocks of q, blocks of k]`` True for blocks that no end of the tokens cuts off.

    FlexAttention asks the mask about the others, as for its own block masks.
    """
    rows = torch.arange(BLOCK, queries + BLOCK, BLOCK, device=device) <= queries
    columns = torch.arange(BLOCK, keys + BLOCK, BLOCK, device=device) <= keys
    return rows[:, None] & columns
