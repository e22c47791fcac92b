"""A text's own tokens in random orders: what heads do where only the order of words is missing.

The control for everything that is said of a head on one text. Position and frequency are those of
the text, so what a head does on shuffles as well, it does not do because of what the text says.

Letters: K shuffles, N tokens of each, T tokens of the text, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from polyhead.interpret.heads import TokenizedText
from polyhead.interpret.probe import Probe
from polyhead.interpret.tables import run_ids

LONGEST = 256
"""Tokens of a shuffle; of a longer text each draws so many at random."""

_ALL_TOKENS = 2048
_FEWEST, _MOST = 4, 16


@dataclass(frozen=True)
class Shuffles:
    """What a model's heads do on random orders of a text's tokens.

    Attributes:
        order: ``[K, N]`` which token of the text stands at each place. Special tokens stay where
            they are, at the beginning or the end.
        places: ``[K, T]`` where each token of the text stands; −1 where it was not drawn.
        seen: The run of all K as one batch.
        causal: Whether a token sees only itself and what is before it.
    """

    order: Tensor
    places: Tensor
    seen: Probe
    causal: bool

    @classmethod
    def of(cls, model: nn.Module, tokens: TokenizedText, *, causal: bool, seed: int = 0) -> Self:
        """Runs a model on shuffles of a text, always the same draw for the same seed.

        Args:
            model: As ``polyhead.load`` makes it.
        """
        generator = torch.Generator().manual_seed(seed)
        special = special_tokens(tokens)
        count = len(special)
        words = (~special).nonzero()[:, 0]
        last = int(words[-1]) if len(words) else -1
        before = [i for i in special.nonzero()[:, 0].tolist() if i <= last]
        behind = [i for i in special.nonzero()[:, 0].tolist() if i > last]
        drawn = min(len(words), max(0, LONGEST - len(before) - len(behind)))
        length = max(1, len(before) + drawn + len(behind))
        orders = []
        for _ in range(max(_FEWEST, min(_MOST, _ALL_TOKENS // length))):
            chosen = words[torch.randperm(len(words), generator=generator, device="cpu")[:drawn]]
            orders.append(torch.cat([torch.tensor(before), chosen, torch.tensor(behind)]).long())
        order = torch.stack(orders)
        places = torch.full((len(order), count), -1)
        places.scatter_(1, order, torch.arange(order.shape[1]).expand(len(order), -1))
        ids = torch.tensor(tokens.ids, device="cpu")
        return cls(order, places, run_ids(model, ids[order]), causal)

    def pair_weights(
        self, weights: Tensor, queries: Tensor, keys: Tensor, besides: bool = False
    ) -> Tensor:
        """What a head gives one token from another, on average where both were drawn.

        Shuffles that begin with the key are left out: there it gets what any first token gets.

        Args:
            weights: ``[K, H, N, N]`` of one layer of ``seen``.
            queries: Tokens of the text, of a shape that broadcasts with ``keys``.
            keys: ``[B, H, …]`` tokens of the text.
            besides: Whether B is K, and the shuffle of the same number is left out.

        Returns:
            As ``keys``; NaN where no shuffle has both in an order that lets the query see the key.
        """
        found = torch.zeros(keys.shape)
        count = torch.zeros(keys.shape)
        heads = torch.arange(keys.shape[1]).view(1, -1, *[1] * (keys.ndim - 2))
        for number, (places, rows) in enumerate(zip(self.places, weights, strict=True)):
            at, to = places[queries].expand(keys.shape), places[keys]
            known = (at >= 0) & (to > 0) & ((to <= at) if self.causal else torch.ones_like(to) > 0)
            if besides:
                known[number] = False
            found += rows[heads, at, to].masked_fill(~known, 0.0)
            count += known
        return found / torch.where(count > 0, count, torch.nan)


def special_tokens(tokens: TokenizedText) -> Tensor:
    """``[T]`` which tokens stand for no characters of the text."""
    return torch.tensor([stop <= start for start, stop in tokens.spans], device="cpu")
