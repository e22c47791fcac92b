"""A mixture of experts that the ids of tokens choose, by a table.

    out = scale · Σ_chosen w_e expert_e(x) + shared(x),   chosen = table[id],   w = s / Σ_chosen s

Roller et al. 2021, "Hash layers for large sparse models", arXiv 2106.04426; DeepSeek-V4 (2026),
whose first layers choose so. The scores s of a router weigh what the experts give.

Shape letters: B batch, T tokens, E embed size, W vocabulary size, X experts, K visited.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from polyhead.config import TokenMixtureConfig
from polyhead.config.layout import EMBEDDING, TOKENS
from polyhead.errors import UnsupportedError
from polyhead.layers.experts import Experts, scores_of
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.registry import register_builder

_READS = {TOKENS: EMBEDDING}


class TokenExperts(Experts):
    """``Experts`` that ids choose; its arguments.

    Attributes:
        table: ``[W, K]`` int64, the experts of each token; at first they take turns.
    """

    config: TokenMixtureConfig
    table: Tensor

    def __init__(self, embed_dim: int, config: TokenMixtureConfig) -> None:
        super().__init__(embed_dim, config)
        turns = torch.arange(config.vocab_size * config.experts_per_token, device="cpu")
        table = (turns % config.num_experts).view(config.vocab_size, -1)
        self.register_buffer("table", table.to(self.router.weight.device))

    def forward(self, x: Tensor, handed: Handed | None = None) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``.

        Args:
            x: ``[B, T, E]``.
            handed: What the model hands on: the ids ``[B, T]``.

        Raises:
            ValueError: The layer was called by itself.
        """
        ids: Tensor = handed_to(handed, TOKENS, _READS)
        chosen = self.table[ids.reshape(-1).long()]
        scores = scores_of(self._logits(x.reshape(-1, x.shape[-1])), self.config.scoring)
        return self._answered(x, self._weights(scores, chosen), chosen)

    def route(self, x: Tensor) -> NoReturn:
        """Refused: what tokens are decides, not ``x``."""
        raise UnsupportedError("these experts are chosen by the ids of tokens: got vectors alone")


register_builder(TokenMixtureConfig, TokenExperts)
