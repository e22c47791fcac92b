"""A feed-forward network as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from polyhead.config.layout import Network, shared
from polyhead.config.pieces import Piece


@dataclass(frozen=True)
class FeedForwardConfig(Network, kind="plain"):
    """A position-wise feed-forward network; ``gated`` multiplies by a second projection (GLU).

    silu + gated is SwiGLU, gelu or gelu_tanh + gated is GeGLU (Shazeer 2020).
    """

    hidden_dim: int
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "silu"
    gated: bool = True
    bias: bool = False
    dropout: float = 0.0

    def pieces(self, embed_dim: int) -> Iterator[Piece]:
        F, E, into = self.hidden_dim, embed_dim, 2 if self.gated else 1
        yield Piece("feed_forward", F, (into + 1) * E)
        if self.bias:
            yield Piece("feed_forward", F, into, multiplied=False)
            yield Piece("feed_forward", 1, E, multiplied=False)

    def alive_elements(self, embed_dim: int, ranks: int) -> int:
        F, E = shared(self.hidden_dim, ranks), embed_dim
        return 2 * F + E if self.gated else max(2 * F, F + E)

    def widths(self) -> Mapping[str, int]:
        return {"hidden_dim": self.hidden_dim}
