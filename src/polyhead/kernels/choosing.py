"""The keys that an indexer chooses, from its scores in tiles: no T×S×H products are held.

Native code scores and ranks in one pass (csrc/attention/choose_keys.h) where it may compute and
reads the mask as bounds or as a tensor; elsewhere torch's operations do.

Shape letters: B batch, H heads of the indexer, T queries, S keys, D features.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from polyhead import native
from polyhead.errors import NotPlainError
from polyhead.kernels.base import Refusal
from polyhead.kernels.score_mods import dense, pieces_of, score_mods_of
from polyhead.semantics import (
    Call,
    Chosen,
    KeyValueSource,
    Mask,
    Specification,
    Tokens,
    Visibility,
    index_scores,
)
from polyhead.semantics.arguments import query_tokens, with_source_mask
from polyhead.semantics.call import simplify_mask

_SCORES = 1 << 20
"""Scores of queries that are ranked at a time."""
_PRODUCTS, _KEYS = 1 << 16, 256
"""Products of single heads that are made at a time: a processor's cache holds them; and the keys
that several queries are multiplied with."""


@torch.no_grad()
def choose_keys(
    q: Tensor,
    weights: Tensor,
    source: KeyValueSource,
    count: int,
    *,
    mask: Mask | None = None,
    q_positions: Tensor | None = None,
) -> Chosen:
    """The ``count`` keys of highest score for each query among those that it sees.

    Args:
        q: ``[B, H, T, D]``, queries of the indexer.
        weights: ``[B, H, T]``.
        source: Keys of the indexer, with one kv head.
        count: Keys that a query chooses; of equal scores the first.
        mask: Who may look at whom; where heads differ, a key counts that any head sees.
        q_positions: As in ``attention``.
    """
    q_tokens = query_tokens(q, source, q_positions)
    mask, seen = simplify_mask(with_source_mask(mask, source), q_tokens, source.tokens)
    call = Call(q, source, Specification(1.0, mask), q_tokens, False, seen, False)
    if (blocks := _natively(call, weights, count)) is not None:
        return Chosen(blocks)
    (B, H, T, _), S = q.shape, source.tokens.length
    rows = max(1, min(_SCORES // (B * S), 4 * _PRODUCTS // (_KEYS * B * H)))
    found = []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        scores = torch.full(
            (B, 1, stop - start, S), -torch.inf, device=q.device,
            dtype=torch.promote_types(q.dtype, torch.float32),
        )  # fmt: skip
        asking = q_tokens.slice(start, stop)
        for tile in source.tiles(max(_KEYS, _PRODUCTS // (B * H * (stop - start)))):
            _fill(scores, q[:, :, start:stop], weights[..., start:stop], source, mask, asking, tile)
        found.append(Chosen.top(scores, count).blocks)
    return Chosen(torch.cat(found, dim=2))


def _natively(call: Call, weights: Tensor, count: int) -> Tensor | None:
    """``[B, 1, T, m]`` the keys that native code chooses, or None where it may not."""
    q, source = call.q, call.source
    if (code := native.code_for(q)) is None or source.dtype != q.dtype or not source.in_place:
        return None
    mods = score_mods_of(call)
    if isinstance(mods, Refusal) or count < 1:
        return None
    if mods.keep is not None and mods.keep.shape[1] > 1:
        mods = mods._replace(keep=mods.keep.any(dim=1, keepdim=True))
    count = min(count, source.tokens.length)
    with suppress(NotPlainError):
        return code.choose_keys(dense(q), weights.float(), pieces_of(call), mods, count)[:, None]
    return None


def _fill(
    scores: Tensor,
    q: Tensor,
    weights: Tensor,
    source: KeyValueSource,
    mask: Mask | None,
    asking: Tokens,
    tile: Tokens,
) -> None:
    """Writes the scores ``[B, 1, T, S]`` of one tile of keys where queries see them."""
    seen = Visibility.ALL if mask is None else mask.classify(asking, tile)
    if seen is Visibility.NONE:
        return
    part = index_scores(q, weights, source.read(tile)[0][:, 0])[:, None]
    if mask is not None and seen is Visibility.SOME:
        visible = mask.visible(asking, tile, q.device)
        part = part.masked_fill(~visible.any(dim=1, keepdim=True), -torch.inf)
    scores[..., tile.start : tile.start + tile.length] = part
