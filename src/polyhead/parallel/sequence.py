"""Norms of some tokens on each rank of ``tensor`` (sequence parallelism, Korthikanti et al. 2022).

Between regions every rank keeps its shard of the tokens of the residual path: norms and sums are
computed once in all, and what is kept of them for the backward pass is a share. A region begins by
gathering the tokens, where it would sum gradients, and ends by scattering their sums, where it
would sum outputs: as many bytes as the sums that they replace.

    embedding → own tokens → [norm → all → region → own] … → all tokens → final norm → logits

T tokens need not divide: the last shares are padded with rows that are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.models import Transformer
from polyhead.parallel.collectives import differentiable
from polyhead.parallel.ranks import Ranks, unsupported


@dataclass(eq=False)
class TokenShards:
    """How the tokens of the current call lie on the ranks of ``tensor``.

    Attributes:
        ranks: Those of ``tensor``.
        length: T, of the current call.
    """

    ranks: Ranks
    length: int = 0

    @property
    def each(self) -> int:
        """Tokens of a rank."""
        return -(-self.length // self.ranks.size)

    def filled(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` with rows of zeros behind, so that all shares are equal."""
        return F.pad(x, (0, 0, 0, self.each * self.ranks.size - self.length))

    def all_gather(self, x: Tensor) -> Tensor:
        """All tokens; their gradients are summed."""
        return differentiable(x, self.joined, self.scattered)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Own tokens of the sum over the ranks; gradients are gathered."""
        return differentiable(x, self.scattered, self.joined)

    def own(self, x: Tensor) -> Tensor:
        """Own tokens of what is the same on all ranks."""
        self.length = x.shape[1]
        return differentiable(x, self.slice, self.joined)

    def all(self, x: Tensor) -> Tensor:
        """All tokens, for what all ranks do alike."""
        return differentiable(x, self.joined, self.slice)

    def slice(self, x: Tensor) -> Tensor:
        """Own tokens, filled up."""
        first = self.ranks.rank * self.each
        return self.filled(x)[:, first : first + self.each].clone()

    def joined(self, x: Tensor) -> Tensor:
        """All tokens of all ranks' shares."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks.size)]
        with self.ranks.watched("a gathering of tokens"):
            dist.all_gather(parts, x, group=self.ranks.group)
        return torch.cat(parts, dim=1)[:, : self.length]

    def scattered(self, x: Tensor) -> Tensor:
        """Own tokens of the sum of all ranks' x."""
        parts = [part.contiguous() for part in self.filled(x).chunk(self.ranks.size, dim=1)]
        own = torch.empty_like(parts[0])
        with self.ranks.watched("a sum of tokens"):
            dist.reduce_scatter(own, parts, group=self.ranks.group)
        return own


@dataclass(eq=False)
class _Entering:
    """An embedding whose output tokens are divided among the ranks."""

    module: nn.Module
    shards: TokenShards

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return self.shards.own(type(self.module).forward(self.module, *inputs, **named))


@dataclass(eq=False)
class _Leaving:
    """The last layer, behind which every rank has all tokens again."""

    module: nn.Module
    shards: TokenShards

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        return self.shards.all(type(self.module).forward(self.module, *inputs, **named))


def check_sequence(model: Transformer) -> None:
    """Raises for a model whose tokens cannot be shared between regions.

    Raises:
        UnsupportedError: Names why.
    """
    if model.encoder_layers:
        raise unsupported("sequence_parallel with an encoder-decoder")
    config = model.config
    if config.embedding.dropout or any(layer.dropout for layer in config.layers):
        raise unsupported("sequence_parallel with dropout on the residual path")


def shard_tokens(model: Transformer, shards: TokenShards) -> None:
    """From now on the residual path of a rank is its shard of the tokens."""
    model.embedding.forward = _Entering(model.embedding, shards)  # type: ignore[method-assign]
    last = model.layers[-1]
    last.forward = _Leaving(last, shards)
