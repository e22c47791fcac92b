"""What all selectors share: blocks are scored, and the best ones are chosen for each query.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, N blocks, W width of an entry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import (
    AttentionConfig,
    BlockIndexerConfig,
    MeanIndexerConfig,
    SelectorConfig,
)
from polyhead.errors import ConfigError
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.selectors.places import Places, whole_blocks
from polyhead.semantics import Chosen, KeyValueSource

_SCORES = 1 << 18
"""Scores of queries that are ranked at a time."""


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """One call of a layer whose queries choose.

    Attributes:
        x: ``[B, T, E]``, its input.
        q: ``[B, H, T, D]``.
        source: Keys and values, those of the call among them.
        places: Where queries and keys stand.
        positions: Of the tokens, or of the first.
        given: Positions as the layer was given them.
        rope: Rotary positions of the layer.
        step: The step of its cache; None: there is none.
    """

    x: Tensor
    q: Tensor
    source: KeyValueSource
    places: Places
    positions: int | Tensor
    given: Tensor | None
    rope: RoPE | None
    step: Step | None


class BlockSelector(nn.Module):
    """Chooses blocks of keys for every query.

    Args:
        embed_dim: E.
        config: How it chooses.
        heads: The heads that it chooses for.
    """

    def __init__(self, embed_dim: int, config: SelectorConfig, heads: AttentionConfig) -> None:
        super().__init__()
        self.config, self.heads = config, heads
        self._add_modules(embed_dim)

    def _add_modules(self, embed_dim: int) -> None:
        """Makes its parameters."""

    @abstractmethod
    def forward(self, call: Choice) -> Chosen | None:
        """The keys that queries choose; None: all. Memories of the step are written."""

    def _rotated(self, x: Tensor, positions: int | Tensor, rope: RoPE | None) -> Tensor:
        """``[B, T, heads, D]`` of an indexer, as many features rotated as of the layer's heads."""
        if rope is None:
            return x
        dim = rope.config.dim or self.heads.head_dim
        turned = rope.apply(x[..., :dim], positions, head_axis=2)
        return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


class ProjectedSelector(BlockSelector):
    """Queries of J heads of its own, and one key of each token.

    Attributes:
        q_proj: ``[J · D, E]``.
        k_proj: ``[D, E]``.
        q_norm, k_norm: Over the D features of a head.
    """

    config: BlockIndexerConfig | MeanIndexerConfig

    def _add_modules(self, embed_dim: int) -> None:
        J, D = self.config.num_heads, self.config.head_dim
        self.q_proj = nn.Linear(embed_dim, J * D, bias=False)
        self.k_proj = nn.Linear(embed_dim, D, bias=False)
        self.q_norm = build_norm(D, self.config.norm)
        self.k_norm = build_norm(D, self.config.norm)


class PooledSelector(BlockSelector):
    """A selector that remembers one entry for each whole block, made of its keys.

    A query chooses its own block, and others by their entries.
    """

    def forward(self, call: Choice) -> Chosen | None:
        size, places = self.config.size, call.places
        k, _ = whole_blocks(call.source, places, size)
        (memory,) = self.config.memories(self.heads)
        entries = k.new_empty(len(k), 0, memory.unit_elements)
        if k.shape[2]:
            entries = self.entries(k.detach())
        if call.step is not None:
            entries = call.step.pooled("blocks", entries.to(call.x.dtype))
        if max(places.after) <= size * self.config.top_k or self.reads_all(call):
            return None
        group = self.heads.num_heads // self.config.choices(self.heads)
        return places.seen(self.choose(call, entries), size, group)

    def choose(self, call: Choice, entries: Tensor) -> Tensor:
        """``[B, choices, T, top_k]`` blocks of queries; ``entries`` ``[B, N, W]`` of whole ones."""
        q, lists = call.q.detach(), self.config.choices(self.heads)
        return best_blocks(
            lambda rows: self.scores(q[:, :, rows], entries),
            call.places,
            self.config.top_k,
            self.config.size,
            lists,
        )

    def reads_all(self, call: Choice) -> bool:
        """Whether the queries of a call read all keys."""
        return False

    @abstractmethod
    def entries(self, k: Tensor) -> Tensor:
        """``[B, n, W]`` entries of n blocks whose keys are ``[B, G, n, size, D]``."""

    @abstractmethod
    def scores(self, q: Tensor, entries: Tensor) -> Tensor:
        """``[B, choices, T, N]`` in float32 or more, for queries ``[B, H, T, D]``."""


@torch.no_grad()
def best_blocks(
    score: Callable[[slice], Tensor],
    places: Places,
    count: int,
    size: int,
    lists: int,
    *,
    first: int = 0,
    last: int = 1,
    per_query: int | None = None,
) -> Tensor:  # [B, lists, T, m]
    """The blocks of highest score up to a query's own; of equal scores the first.

    Args:
        score: Scores ``[B, n, t, N]`` of a run of queries for the first N blocks; others have none.
        places: Where queries and keys stand.
        count: Blocks that a query chooses.
        size: Keys of a block.
        lists: n, choices of a token.
        first: Blocks at the beginning that are always chosen.
        last: Blocks up to a query's own that are always chosen.
        per_query: Numbers that ``score`` makes for a query at most; None: its scores.
    """
    own = places.queries.div(size, rounding_mode="floor")
    own = own[None, None, :, None] if own.ndim == 1 else own[:, None, :, None]
    N, T = -(-max(places.after) // size), own.shape[2]
    block = torch.arange(N, device=own.device)
    rows = max(1, _SCORES // (len(places.after) * (per_query or lists * N)))
    found = []
    for start in range(0, T, rows):
        run = slice(start, min(start + rows, T))
        scores = score(run)
        if scores.shape[-1] < N:
            scores = torch.nn.functional.pad(scores, (0, N - scores.shape[-1]), value=-torch.inf)
        mine = own[:, :, run]
        always = block > mine - last
        if first:
            always = always | (block < first)
        scores = scores.masked_fill(always, torch.inf).masked_fill(block > mine, -torch.inf)
        found.append(Chosen.top(scores, count).blocks)
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


_SELECTORS: dict[type[Any], type[BlockSelector]] = {}


def register_selector(config: type[SelectorConfig], made: type[BlockSelector]) -> None:
    """From now on ``made`` is the module of configurations of exactly this class."""
    _SELECTORS[config] = made


def build_selector(embed_dim: int, config: SelectorConfig, heads: AttentionConfig) -> BlockSelector:
    """The selector that ``config`` describes.

    Raises:
        ConfigError: A class that no module was made for.
    """
    made = _SELECTORS.get(type(config))
    if made is None:
        known = ", ".join(sorted(each.__name__ for each in _SELECTORS))
        raise ConfigError(
            f"no selector is made from a {type(config).__name__}: known configurations are {known}"
        )
    return made(embed_dim, config, heads)
