"""A call's arguments for compiled kernels: pieces of keys and values, and the features beside them.

Keys and values are read where they lie, in one piece or in the few of a ring. A mask becomes, for
every query, the range of key positions that it may see, which costs O(T) memory; an explicit tensor
is read as it is. A relative bias becomes a number for every distance and head. Masks and biases
that have no such form may be drawn for all pairs, up to a size that the kernel names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.kernels.base import Refusal
from polyhead.native.arguments import NO_SCORE_MODS, KVSegment, ScoreMods
from polyhead.semantics import Call
from polyhead.semantics.biases import Bias, KernelBias
from polyhead.semantics.masks import Mask, Range
from polyhead.semantics.scores import dropout_of
from polyhead.semantics.storage import check_storage
from polyhead.semantics.tokens import Tokens

_NOWHERE = torch.iinfo(torch.int64)
"""The range of positions; a bound at either end hides nothing but the very last one."""


def pieces_of(call: Call) -> list[KVSegment]:
    """The keys and values of a call where they lie."""
    found = []
    for tokens, k, v, table, coding in call.source.segments():
        positions = None
        if tokens.positions is not None or tokens.stride != 1:
            positions = dense(tokens.position_tensor(k.device).long()).contiguous()
        pages, skipped, paged = table or (None, 0, 0)
        first = tokens.places.low
        found.append(KVSegment(k, v, first, positions, pages, skipped, paged, coding))
    return found


def score_mods_of(call: Call, drawn: int = 0, *, inference: bool = False) -> ScoreMods | Refusal:
    """Features beside plain softmax(Q Kᵀ · scale) V, or the one that would need a T×S tensor.

    Args:
        call: The attention call to lower.
        drawn: Bytes that such a T×S tensor may have; 0: none is drawn.
        inference: Whether ``ScoreMods.rounded`` and ``chosen`` are understood.
    """
    spec, q = call.spec, call.q
    if spec.mask is None and spec.bias is None and spec.softcap is None and not spec.dropout_p:
        return NO_SCORE_MODS
    bounds = keep = positions = chosen = None
    numbers = KernelBias()
    if spec.mask is not None:
        found = spec.mask.range(call.q_tokens, call.source.tokens, q.device)
        if found is None or (found.chosen is not None and not inference):
            found = _drawn_mask(call, spec.mask, drawn)
        if found is None:
            return Refusal(f"mask={spec.mask!r} (it would need a T×S tensor)")
        if found.chosen is None or found.low is not None or found.high is not None:
            bounds = _bounds(found, q)  # else all of what was chosen is seen, and it is read once
        if found.keep is not None:
            keep = found.keep.expand(*found.keep.shape[:2], q.shape[2], call.source.tokens.length)
            keep = keep if keep.stride(-1) == 1 else keep.contiguous()
        chosen = found.chosen
    if spec.bias is not None:
        if not torch.compiler.is_compiling():
            for x in spec.bias.tensors:
                check_storage("bias", x)  # copied below if need be
        found_numbers = spec.bias.kernel_bias()
        if found_numbers is None or (found_numbers.rounded and not inference):
            found_numbers = _drawn_bias(call, spec.bias, drawn)
        if found_numbers is None:
            return Refusal(f"bias={spec.bias!r} (it would need a T×S tensor)")
        numbers = found_numbers
        if numbers.tensor is None:
            positions = dense(call.q_tokens.position_tensor(q.device).long())
    slopes, by_distance = (None if x is None else dense(x) for x in numbers[:2])
    dropout = dropout_of(spec, call.q_tokens, call.source.tokens) if spec.dropout_p else None
    bias = positions, slopes, by_distance, numbers.tensor
    mods = ScoreMods(spec.softcap or 0.0, bounds, keep, *bias, dropout, rounded=numbers.rounded)
    if chosen is None:
        return mods
    if any(x is not None for x in (keep, numbers.tensor, dropout)):
        return Refusal(f"mask={spec.mask!r} with dropout, a tensor of all pairs or a bias tensor")
    blocks, size, shared, skipped = chosen
    return mods._replace(
        chosen=_ascending(blocks), chosen_size=size, chosen_queries=(shared, skipped)
    )


def _ascending(blocks: Tensor) -> Tensor:
    """Each block once and in ascending order; numbers behind all keys follow."""
    nowhere = _NOWHERE.max
    blocks = blocks.long()
    blocks = blocks.masked_fill(blocks < 0, nowhere).sort(dim=-1).values
    repeated = (blocks[..., 1:] == blocks[..., :-1]) & (blocks[..., 1:] != nowhere)
    if repeated.any():
        blocks[..., 1:].masked_fill_(repeated, nowhere)
        blocks = blocks.sort(dim=-1).values
    return blocks


def _drawn_mask(call: Call, mask: Mask, most: int) -> Range | None:
    """A mask as an explicit tensor, and the range around what each query sees."""
    k, device = call.source.tokens, call.q.device
    keep = _drawn(call, lambda q: mask.visible(q, k, device), most)
    if keep is None:
        return None
    if k.positions is not None or k.stride != 1:
        return Range(None, None, keep)
    seen = keep.any(dim=1).to(torch.uint8)  # [1 or B, T, S]
    some = seen.amax(dim=-1) != 0
    first, behind = seen.argmax(dim=-1), seen.flip(-1).argmax(dim=-1)
    start = k.places.low
    low = (start + first).where(some, start)
    return Range(low, (start + k.length - behind).where(some, start), keep)


def _drawn_bias(call: Call, bias: Bias, most: int) -> KernelBias | None:
    """A bias as a tensor, where no gradient flows to it."""
    if any(x.requires_grad for x in bias.tensors):
        return None
    k, like = call.source.tokens, call.q.new_empty(0, dtype=torch.float32)
    tensor = _drawn(call, lambda q: bias.tile(q, k, like), most // like.itemsize)
    return None if tensor is None else KernelBias(tensor=tensor)


def _drawn(call: Call, draw: Callable[[Tokens], Tensor], most: int) -> Tensor | None:
    """``[1 or B, 1 or H, T, S]`` of all queries, unless that has more than so many elements."""
    q, T, S = call.q_tokens, call.q_tokens.length, call.source.tokens.length
    if most < T * S:
        return None
    positions = None if q.positions is None else q.positions[..., :1]
    one = draw(replace(q, length=1, positions=positions, span=None))
    heads = one.shape[:-2].numel()
    if heads * T * S > most:
        return None
    drawn = one if T == 1 else draw(q)
    drawn = drawn[(None,) * (4 - drawn.ndim)]
    return drawn.expand(*drawn.shape[:2], T, S)


def dense(x: Tensor) -> Tensor:
    """x as compiled code reads it: its last dimension dense, and no negated view."""
    # Under torch.compile this cannot be known; the operator itself checks the tensors at run time.
    if x.stride(-1) == 1 and (torch.compiler.is_compiling() or not x.is_neg()):
        return x
    check_storage("a tensor that must be copied", x)  # the copy would read freed memory
    return x.resolve_neg().contiguous()


def _bounds(found: Range, q: Tensor) -> tuple[Tensor, Tensor]:
    """``[1 or B, T]`` low and high of the positions that each query sees."""
    low, high = found.low, found.high
    queries, device = q.shape[2], q.device
    low = torch.full((1, queries), _NOWHERE.min, device=device) if low is None else low
    high = torch.full((1, queries), _NOWHERE.max, device=device) if high is None else high
    rows = max(len(low), len(high))
    return _rows(low, rows), _rows(high, rows)


def _rows(bound: Tensor, rows: int) -> Tensor:
    return bound.expand(rows, -1).long().resolve_neg().contiguous()
