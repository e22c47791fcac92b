"""The keys that queries choose, from scores in tiles: no T×S×H products are held.

Native code scores and ranks in one pass (csrc/attention/choose_keys.h) where it may compute and
reads the mask as bounds or as a tensor; elsewhere torch's operations do.

Shape letters: B batch, H heads of the indexer, G kv heads, T queries, S keys, D features.
"""

from __future__ import annotations

from collections.abc import Callable
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
    tokens = query_tokens(q, source, q_positions)
    whole, seen = simplify_mask(with_source_mask(mask, source), tokens, source.tokens)
    call = Call(q, source, Specification(1.0, whole), tokens, False, seen, False)
    if (blocks := _natively(call, weights, count)) is not None:
        return Chosen(blocks)
    B, H, T, _ = q.shape
    rows = 4 * _PRODUCTS // (_KEYS * B * H)

    def scores(run: slice, tile: Tokens) -> Tensor:
        k = source.read(tile)[0][:, 0]
        return index_scores(q[:, :, run], weights[..., run], k)[:, None]

    found = _best(
        scores, (B, 1, T), count, source, mask, tokens, rows, lambda T: _PRODUCTS // (B * H * T)
    )
    return Chosen(found)


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


@torch.no_grad()
def choose_by_key(
    numbers: Callable[[Tokens], Tensor],
    q: Tensor,
    source: KeyValueSource,
    count: int,
    *,
    mask: Mask | None = None,
    q_positions: Tensor | None = None,
) -> Chosen:
    """The ``count`` keys with the highest numbers for each query among those that it sees.

    Args:
        numbers: ``[B, G, 1, n]`` of a tile of n keys, the same for all queries of a kv head.
        q: ``[B, H, T, D]``, the queries of attention.
        source: Its keys.
        count: Keys that a query chooses; of equal numbers the first.
        mask: Who may look at whom; where heads differ, a key counts that any head sees.
        q_positions: As in ``attention``.
    """
    (B, H, T, _), G = q.shape, source.num_kv_heads
    tokens = query_tokens(q, source, q_positions)
    found = _best(
        lambda _, tile: numbers(tile),
        (B, G, T),
        count,
        source,
        mask,
        tokens,
        T,
        lambda _: _PRODUCTS,
    )
    return Chosen(found, group=H // G)


def _best(
    scores: Callable[[slice, Tokens], Tensor],
    shape: tuple[int, int, int],
    count: int,
    source: KeyValueSource,
    mask: Mask | None,
    q_tokens: Tokens,
    rows: int,
    keys: Callable[[int], int],
) -> Tensor:
    """``[B, n, T, count]`` the keys of highest score.

    Args:
        scores: Those of a run of queries and a tile of keys, ``[B, n, 1 or T, S]``.
        shape: B, n and T.
        count: Keys that a query chooses.
        source: The keys.
        mask: Who may look at whom.
        q_tokens: The queries.
        rows: Queries at a time at most.
        keys: Keys at a time for so many queries; at least 256 are taken.
    """
    mask, _ = simplify_mask(with_source_mask(mask, source), q_tokens, source.tokens)
    (B, n, T), S = shape, source.tokens.length
    rows = max(1, min(_SCORES // (B * n * S), rows))
    precise, found = torch.promote_types(source.dtype, torch.float32), []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        filled = torch.full(
            (B, n, stop - start, S), -torch.inf, device=source.device, dtype=precise
        )
        asking = q_tokens.slice(start, stop)
        for tile in source.tiles(max(_KEYS, keys(stop - start))):
            seen = Visibility.ALL if mask is None else mask.classify(asking, tile)
            if seen is Visibility.NONE:
                continue
            part = scores(slice(start, stop), tile)
            if mask is not None and seen is Visibility.SOME:
                visible = mask.visible(asking, tile, source.device)
                part = part.masked_fill(~visible.any(dim=1, keepdim=True), -torch.inf)
            filled[..., tile.start : tile.start + tile.length] = part
        found.append(Chosen.top(filled, count).blocks)
    return torch.cat(found, dim=2)
