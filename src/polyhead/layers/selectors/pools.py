"""What indexers share that score whole blocks of tokens by one entry for each.

A query chooses among the whole blocks up to itself; it sees the tokens behind the last of them too.

Shape letters: B batch, J heads of the indexer, T queries, m tokens of a block, n new blocks,
N blocks, W width of what entries are made of, D features of an entry.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from polyhead.caches.layer_cache import Step
from polyhead.kernels.choosing import choose_keys
from polyhead.layers.selectors.places import Places, pooled_blocks, source_of
from polyhead.semantics import Causal, Chosen


def whole_block_entries(
    made: Tensor,
    places: Places,
    step: Step | None,
    size: int,
    width: int,
    entries: Callable[[Tensor], Tensor],
) -> Tensor:
    """``[B, N, D]`` entries of all whole blocks; those of a cache are ``unpooled`` and ``index``.

    Args:
        made: ``[B, T, W]`` of the new tokens.
        places: Where the tokens stand.
        step: Of the layer's cache; None: there is none.
        size: m.
        width: D.
        entries: From ``[B, n, m, W]`` of the blocks that new tokens complete to ``[B, n, D]``.
    """
    if step is not None:
        tail = step.tail("unpooled", step.pack(made))
    else:
        if places.keys is not None:
            made = made.gather(1, places.keys[..., None].expand_as(made))
        tail = F.pad(made, (0, 0, size - 1, 0))
    pools = pooled_blocks(tail, places, size, size)
    new = entries(pools) if pools.shape[1] else made.new_zeros(len(made), 0, width)
    return new if step is None else step.pooled("index", new)


def choose_blocks(
    q: Tensor, weights: Tensor, entries: Tensor, places: Places, size: int, count: int, group: int
) -> Chosen:
    """The keys of the blocks with the greatest Σ_j w_j · relu(q_j · entry), and those behind.

    Args:
        q: ``[B, J, T, D]``.
        weights: ``[B, J, T]`` w.
        entries: ``[B, N, D]``.
        places: Where queries and keys stand.
        size: m.
        count: Whole blocks that a query chooses.
        group: Query heads that share a choice.
    """
    blocks = choose_keys(
        q, weights, source_of(entries, size), count, mask=Causal(), q_positions=places.queries
    ).blocks
    # The tokens behind the last whole block are the first of the next; none where it is whole.
    begun = (places.queries + 1).div(size, rounding_mode="floor")
    begun = begun.expand(len(q), -1)[:, None, :, None]
    return places.seen(torch.cat((blocks, begun), dim=-1), size, group)
