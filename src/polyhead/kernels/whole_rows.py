"""Attention by whole rows of scores, for what is no softmax: a block of queries at a time.

A normalizer needs all scores of a row, so keys are not cut. A block is computed by the formula
(``semantics/reference.py``) and computed again in the backward pass: O(S) memory, never T×S.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyhead.semantics import Call, DenseSource, Tokens, Visibility
from polyhead.semantics.reference import attend
from polyhead.semantics.tokens import is_traced

_LEAST_ROWS = 16
_KEYS = 256
"""Keys that are left out at the ends of a block's row, or not, together."""


def attend_by_rows(call: Call, scores: int) -> Tensor:
    """``out [B, H, T, V]``, differentiable.

    Args:
        call: A call with a normalizer.
        scores: Scores that are held at a time, unless 16 rows are more.
    """
    k, v = call.source.gather()
    (B, H, T, _), S = call.q.shape, k.shape[2]
    rows = max(_LEAST_ROWS, scores // max(1, B * H * S))
    if rows >= T:
        return attend(call).out
    again = call.requires_grad and not is_traced(call.q)
    outs = []
    for start in range(0, T, rows):
        block, before = _block(call, k, v, start, min(start + rows, T))
        if again:
            made = checkpoint(_out, block, use_reentrant=False, preserve_rng_state=False)
        else:
            made = _out(block)
        outs.append(made[:, :, before:])
    return torch.cat(outs, dim=2)


def _out(call: Call) -> Tensor:
    return attend(call).out


def _block(call: Call, k: Tensor, v: Tensor, start: int, stop: int) -> tuple[Call, int]:
    """The call of some queries on the keys that they see, and how many others stand before them."""
    assert call.spec.normalizer is not None
    before = min(start, call.spec.normalizer.queries_before)
    asking = call.q_tokens.slice(start - before, stop)
    keys = _seen(call, asking)
    part = slice(keys.start, keys.start + keys.length)
    source = DenseSource.over(k[:, :, part], v[:, :, part], keys)
    return replace(
        call, q=call.q[:, :, start - before : stop], source=source, q_tokens=asking
    ), before


def _seen(call: Call, asking: Tokens) -> Tokens:
    """The keys without those at both ends that none of these queries sees."""
    keys, mask = call.source.tokens, call.spec.mask
    if mask is None:
        return keys
    seen = [
        tile for tile in keys.split(_KEYS) if mask.classify(asking, tile) is not Visibility.NONE
    ]
    if not seen:
        return keys.slice(0, 0)
    first = seen[0].start - keys.start
    return keys.slice(first, seen[-1].start - keys.start + seen[-1].length)
