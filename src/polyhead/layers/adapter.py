"""A small network behind a layer's feed-forward network.

    y = r + W₂ act(W₁ n)        n = norm(x), r = n or x

Pfeiffer et al. 2022, "X-MOD" (arXiv 2205.06266): one for each language.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

from torch import Tensor, nn

from polyhead.config import NormConfig
from polyhead.config.adapter import AdapterConfig
from polyhead.layers import fused
from polyhead.layers.feed_forward import activate
from polyhead.layers.fixed import Fixed
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm


class Adapter(Fixed):
    """Changes the sum behind a feed-forward network; see the module.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Hidden features, activation, and what is normed.
        norm: Kind of a norm of its own.
        dropout: Of what the network gives, when training.
    """

    def __init__(
        self, embed_dim: int, config: AdapterConfig, norm: NormConfig, dropout: float
    ) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        self.up_proj = nn.Linear(embed_dim, config.dim)
        self.down_proj = nn.Linear(config.dim, embed_dim)
        self.norm = build_norm(embed_dim, norm) if config.norm == "own" else None

    def forward(self, x: Tensor, shared: nn.Module) -> Tensor:
        """``[B, T, E]`` to the same; ``shared`` is the norm of the feed-forward network."""
        n: Tensor = x
        if self.config.norm is not None:
            n = (shared if self.norm is None else self.norm)(x)
        made = linear(activate(linear(n, self.up_proj), self.config.activation), self.down_proj)
        p = self.dropout if self.training else 0.0
        kept = n if self.config.keeps_normed else x
        return fused.dropped(made, p, plus=kept) if p else kept + made
