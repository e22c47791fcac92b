"""Which keys stay: the weights that queries gave them, and the choice by a layout.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.caches.eviction import Evicting
from polyhead.caches.memory import Memory
from polyhead.semantics.call import Specification
from polyhead.semantics.masks import Visibility
from polyhead.semantics.scores import accumulation_dtype
from polyhead.semantics.sources import KeyValueSource
from polyhead.semantics.tokens import Tokens
from polyhead.semantics.weights import weight_rows

_KEYS, _SCORES = 1024, 1 << 21
"""Keys of a tile, and scores that are held at a time."""


def weights_of_keys(
    source: KeyValueSource, q: Tensor, lse: Tensor, spec: Specification, q_tokens: Tokens
) -> Tensor:
    """``[B, G, S]`` exact weights of each key, added up over queries and the heads of a group.

    Args:
        source: The keys.
        q: ``[B, H, T, D]`` queries.
        lse: ``[B, H, T]`` over all keys of the source.
        spec: As the attention was computed.
        q_tokens: Positions and places of the queries.
    """
    (B, H), G, keys = q.shape[:2], source.num_kv_heads, source.tokens
    total = q.new_zeros(B, G, keys.length, dtype=accumulation_dtype(q.dtype))
    most = max(1, _SCORES // (B * H * _KEYS))
    for tile in source.tiles(_KEYS):
        k, _ = source.read(tile)
        for run in q_tokens.split(most):
            if spec.mask is not None and spec.mask.classify(run, tile) is Visibility.NONE:
                continue
            first = run.start - q_tokens.start
            part = slice(first, first + run.length)
            weights = weight_rows(q[:, :, part], k, lse[:, :, part], spec, run, tile)
            weights = weights.sum(dim=2).view(B, G, H // G, -1).sum(dim=2)
            total[:, :, tile.start : tile.start + tile.length] += weights
    return total


def last_queries(
    q: Tensor, lse: Tensor, q_tokens: Tokens, real: Tensor, count: int
) -> tuple[Tensor, Tensor, Tokens]:
    """The last ``count`` queries of each row that are real tokens, ``[B, T]`` bool."""
    last = real.int().argsort(dim=1, stable=True)[:, -count:]
    positions = q_tokens.position_tensor(q.device).expand(real.shape).gather(1, last)
    lse = lse.gather(2, last[:, None].expand(-1, lse.shape[1], -1))
    q = q.gather(2, last[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    return q, lse, Tokens.of(last.shape[1], positions=positions)


def staying(
    layout: Evicting,
    weights: Tensor,
    positions: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
) -> Tensor:
    """``[B, G, S]`` bool: the last tokens, and of the others those that a layout ranks highest.

    Args:
        layout: How keys are ranked.
        weights: ``[B, G, S]`` of the queries that count.
        positions: ``[B, G, S]``, below 0 where there is no token.
        lengths: Tokens of each row, those included that are forgotten.
        counts: Keys of each row that stay.
    """
    length, count = torch.tensor([lengths, counts], device=weights.device)[..., None, None]
    older = (positions >= 0) & (positions < length - layout.last_tokens)
    ranks = layout.ranked(weights, positions, older).masked_fill(~older, torch.inf)
    ranks = ranks.masked_fill(positions < 0, -torch.inf)
    order = ranks.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(order.shape[-1], device=order.device) < count
    return torch.zeros_like(older).scatter(-1, order, first.expand_as(older))


def keep(rows: Memory, records: Sequence[Tensor], stays: Tensor, stops: list[int]) -> None:
    """Leaves only the tokens that stay, of those held and then the new ones.

    Args:
        rows: What is held, with room for what stays.
        records: The fields of new tokens, ``[B, G, T, width]``.
        stays: ``[B, G, held + T]`` bool.
        stops: Tokens of each row that stay.
    """
    extent, most = rows.extent, max(stops)
    in_place = stays.shape[2] == extent + 1 and {*rows.stops, *stops} == {extent}
    if in_place:  # the new token takes the place of the one that is evicted
        index = stays[..., :extent].int().argmin(dim=-1)[..., None, None]
    else:
        index = (~stays).int().argsort(dim=-1, stable=True)[..., :most, None]
    for tensor, record in zip(rows.tensors, records, strict=True):
        at = index.expand(-1, -1, -1, tensor.shape[3])
        if in_place:
            tensor.scatter_(2, at, record)
        else:
            tensor[:, :, :most] = torch.cat((tensor[:, :, :extent], record), dim=2).gather(2, at)
    rows.stops = stops
