"""Other libraries' masks as mask expressions: padding, additive float masks, and all of several.

Shape letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.semantics import Keep, KeyLengths, Mask
from polyhead.semantics.tokens import is_traced


def all_of(*masks: Mask | None) -> Mask | None:
    """The masks joined with ``&``; None where there are none."""
    joined: Mask | None = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else joined & mask
    return joined


def padding(real_BS: Tensor) -> Mask | None:
    """A mask of keys from ``[B, S]`` bool, True for keys that are real.

    Padding on the left, on the right or on both sides becomes key lengths, from which whole tiles
    can be skipped; holes in the middle stay an explicit ``[B, 1, 1, S]`` mask; no padding at all
    is None.
    """
    explicit = Keep(real_BS[:, None, None, :])
    if is_traced(real_BS):
        return explicit
    counts = real_BS.sum(dim=-1)
    before = (real_BS.cumsum(dim=-1) == 0).sum(dim=-1)
    S = real_BS.shape[-1]
    columns = torch.arange(S, device=real_BS.device)
    stop = before + counts
    in_one_run = (columns >= before[:, None]) & (columns < stop[:, None])
    # One transfer from the device for all three questions; an empty row has no run and is fine.
    runs, right, left = torch.stack(
        [(in_one_run == real_BS).all(), (stop < S).any(), ((before > 0) & (counts > 0)).any()]
    ).tolist()
    if not runs:
        return explicit
    # In a row without any real key, ``before`` is S and so is ``stop``.
    stop = torch.where(counts == 0, 0, stop)
    right = right or bool((counts == 0).any())
    before = torch.where(counts == 0, 0, before)
    return all_of(KeyLengths(stop) if right else None, ~KeyLengths(before) if left else None)


def additive(mask: Tensor, floor: float) -> tuple[Keep | None, Tensor | None]:
    """Splits a float mask that is added to the scores into a mask and what remains a bias.

    Args:
        mask: ``[B, H, T, S]`` or anything that broadcasts to it.
        floor: Values at or below it mean "may not attend".

    Returns:
        The mask (None where nothing is masked) and the bias (None where the rest is zero). Under
        tracing neither can be known and both are given.
    """
    allowed = mask > floor
    # NaN compares false but is not a mask: it stays in the bias and shows itself.
    allowed = allowed | mask.isnan()
    rest = mask.masked_fill(~allowed, 0.0)
    if is_traced(mask):
        return Keep(allowed), rest
    some_masked, some_added = torch.stack([(~allowed).any(), (rest != 0).any()]).tolist()
    keep = Keep(allowed) if some_masked else None
    # A mask that is learned keeps its gradient even while it is zero.
    return keep, rest if some_added or mask.requires_grad else None
