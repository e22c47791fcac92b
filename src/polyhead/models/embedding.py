"""What enters a Transformer: token vectors, with positions and segments where the family has them.

    norm(tokens · scale + positions + segments)

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import EmbeddingConfig
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions
from polyhead.layers.unbuilt import refuse_unbuilt


class Embedding(nn.Module):
    """Token ids to vectors.

    Args:
        vocab_size: Number of ids.
        embed_dim: E.
        max_positions: How many learned positions there are.
        config: Which parts there are.
    """

    def __init__(
        self, vocab_size: int, embed_dim: int, max_positions: int, config: EmbeddingConfig
    ) -> None:
        super().__init__()
        refuse_unbuilt(config, "position_offset", "sinusoid", "projection", "frontend")
        self.config = config
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions: LearnedPositions | SinusoidalPositions | None = None
        if config.positions == "learned":
            self.positions = LearnedPositions(max_positions, embed_dim)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(embed_dim)
        self.segments = (
            nn.Embedding(config.num_segments, embed_dim) if config.num_segments else None
        )
        self.norm = None if config.norm is None else build_norm(embed_dim, config.norm)

    def forward(
        self, ids: Tensor, positions: int | Tensor = 0, segments: Tensor | None = None
    ) -> Tensor:
        """``[B, T, E]``.

        Args:
            ids: ``[B, T]`` whole numbers below vocab_size.
            positions: The first token's position, the others following on; or ``[T]``, ``[B, T]``.
            segments: ``[B, T]`` whole numbers below num_segments; default all 0.

        Raises:
            ValueError: Segments for a model that has none, or of another shape than ``ids``.
        """
        x: Tensor = self.tokens(ids)
        if self.config.scale != 1.0:
            # Rounded to the weights' dtype first, as the families that scale were trained.
            x = x * torch.tensor(self.config.scale, dtype=x.dtype, device=x.device)
        if self.segments is not None:
            x = x + (
                self.segments.weight[0] if segments is None else self._of_segments(ids, segments)
            )
        elif segments is not None:
            raise ValueError("this model has no segments (num_segments=0): got segments")
        if isinstance(self.positions, LearnedPositions):
            if isinstance(positions, Tensor):
                positions = positions.clamp(min=0)  # padding stands below 0
            x = x + self.positions(positions, ids.shape[1])
        elif self.positions is not None:
            x = x + self.positions(positions, ids.shape[1], x.dtype, x.device)
        if self.norm is not None:
            x = self.norm(x)
        if self.training and self.config.dropout:
            x = F.dropout(x, self.config.dropout)
        return x

    def _of_segments(self, ids: Tensor, segments: Tensor) -> Tensor:
        count = self.config.num_segments
        if segments.shape != ids.shape:
            raise ValueError(
                f"segments must be [B, T] = {list(ids.shape)} as ids: got {list(segments.shape)}"
            )
        if segments.numel() and not 0 <= int(segments.min()) <= int(segments.max()) < count:
            raise ValueError(
                f"segments must be 0 to {count - 1}: got {int(segments.min())} to "
                f"{int(segments.max())}"
            )
        vectors: Tensor = self.segments(segments)  # type: ignore[misc]
        return vectors
