"""What enters a Transformer: token vectors, with positions and segments where the family has them.

    norm(tokens · scale + positions + segments)

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import EmbeddingConfig, SoftPromptConfig, TokenDropoutConfig
from polyhead.errors import ConfigError
from polyhead.layers.fixed import Fixed
from polyhead.layers.fused import dropped
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import AxialPositions, LearnedPositions, SinusoidalPositions
from polyhead.layers.quantized import QuantizedEmbedding
from polyhead.models.frontends import build_frontend


class Embedding(Fixed):
    """Token ids to vectors.

    Args:
        vocab_size: Number of ids.
        embed_dim: Embedding size E of the residual stream.
        max_positions: How many learned positions there are.
        config: Which parts there are.
        tokens: The table of another embedding, to share it; a state dict holds it there alone.
    """

    tokens: nn.Embedding | QuantizedEmbedding | None
    prefix: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        max_positions: int,
        config: EmbeddingConfig,
        tokens: nn.Embedding | QuantizedEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        projection, offset = config.projection, config.position_offset
        dim = embed_dim if projection is None else projection.dim
        if config.frontend is not None:
            self.frontend = build_frontend(embed_dim, config.frontend)
            self.tokens = None
        elif tokens is None:
            self.tokens = nn.Embedding(vocab_size, dim)
        else:
            self.__dict__["tokens"] = tokens  # not a submodule: it belongs to another embedding
        of = None if projection is None else projection.of
        summed = embed_dim if of == "tokens" else dim
        self.projection = (
            None
            if projection is None
            else nn.Linear(config.projected_dim, embed_dim, bias=projection.bias)
        )
        self.positions: LearnedPositions | AxialPositions | SinusoidalPositions | None = None
        if config.positions == "learned":
            self.positions = LearnedPositions(max_positions + offset, summed)
        elif config.axial is not None:
            if sum(config.axial.dims) != summed:
                raise ConfigError(
                    f"axial dims must sum to {summed} features: got {list(config.axial.dims)}"
                )
            self.positions = AxialPositions(config.axial)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(summed, config.sinusoid)
        self.segments = nn.Embedding(config.num_segments, summed) if config.num_segments else None
        self.first_rows = nn.ModuleList(
            nn.Embedding(each.rows, each.dim or summed) for each in config.first_rows
        )
        normed = embed_dim if of == "raw_sum" else summed
        self.norm = None if config.norm is None else build_norm(normed, config.norm)
        prefix = nn.Parameter(torch.empty(config.prefix, embed_dim)) if config.prefix else None
        self.register_parameter("prefix", prefix)
        prompt = config.soft_prompt
        self.soft_prompt = None if prompt is None else SoftPrompt(embed_dim, prompt)
        if config.own_vector is not None:
            self.own_vector = nn.Parameter(torch.zeros(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the prefix: normal with standard deviation 0.02. A vector of its own is 0."""
        if self.config.own_vector is not None:
            nn.init.zeros_(self.own_vector)
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)

    @property
    def table(self) -> Tensor:
        """``[vocab_size, dim]``, unpacked anew each time where it is quantized.

        Raises:
            ValueError: There are no tokens.
        """
        return self._own_tokens().weight

    @property
    def matrix(self) -> Tensor | QuantizedEmbedding:
        """What a tied head multiplies by: ``table``, or where that is quantized its module."""
        tokens = self._own_tokens()
        return tokens if isinstance(tokens, QuantizedEmbedding) else tokens.weight

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype of the vectors and on their device."""
        tokens = self.tokens
        if tokens is None:
            return next(self.frontend.parameters())
        return tokens.like if isinstance(tokens, QuantizedEmbedding) else tokens.weight

    def __dir__(self) -> list[str]:
        """Without what raises: ``torch.jit.trace`` reads every name that is listed."""
        absent = ("table", "matrix") if self.tokens is None else ()
        return [name for name in nn.Module.__dir__(self) if name not in absent]  # type: ignore[no-untyped-call]

    def _own_tokens(self) -> nn.Embedding | QuantizedEmbedding:
        if self.tokens is None:
            raise ValueError("patches and sound have no table of tokens")
        return self.tokens

    def share(self, old: nn.Module, new: nn.Module) -> None:
        """Uses ``new`` for tokens if it used ``old``, the shared table of another embedding."""
        if self.__dict__.get("tokens") is old:
            self.__dict__["tokens"] = new

    def forward(
        self,
        ids: Tensor,
        positions: int | Tensor = 0,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """``[B, T, E]``, with P vectors of a prefix or a soft prompt in front ``[B, P + T, E]``.

        Args:
            ids: ``[B, T]`` whole numbers below vocab_size, or what the frontend reads.
            positions: The first token's position, the others following on; or ``[T]``, ``[B, T]``.
            segments: ``[B, T]`` whole numbers below num_segments; default all 0, or none where
                they are optional.
            lengths: ``[B]`` tokens that are not padding, where the configuration reads them;
                default T.

        Raises:
            ValueError: Segments for a model that has none, or of another shape than ``ids``.
        """
        x: Tensor = self.frontend(ids) if self.tokens is None else self.tokens(ids)
        if self.config.token_dropout is not None:
            x = _without_masked(x, ids, lengths, self.config.token_dropout)
        if self.config.scale != 1.0:
            # Rounded to the weights' dtype first, as the families that scale were trained.
            x = x * torch.full((), self.config.scale, dtype=x.dtype, device=x.device)
        if self.config.own_vector is not None:
            x = torch.where((ids == self.config.own_vector)[..., None], self.own_vector, x)
        projection = self.config.projection
        if self.projection is not None and projection is not None and projection.of == "tokens":
            x = self.projection(self._before_projection(x, lengths, projection.neighbours))
        first = self.config.norm_of == "tokens"
        if self.norm is not None and first:
            x = self.norm(x)
        if segments is not None:
            x = x + self._of_segments(ids, segments)
        elif self.segments is not None and not self.config.segments_optional:
            x = x + self.segments.weight[0]
        if isinstance(self.positions, (LearnedPositions, AxialPositions)):
            if isinstance(positions, Tensor):
                positions = positions.clamp(min=0)  # padding has positions below 0
            x = x + self.positions(positions + self.config.position_offset, x.shape[1])
        elif self.positions is not None:
            at = positions + self.config.position_offset
            x = x + self.positions(at, x.shape[1], x.dtype, x.device)
        for table, each in zip(self.first_rows, self.config.first_rows, strict=True):
            if each.dim is None:
                x = x + each.times * cast(nn.Embedding, table).weight[0]
        if self.projection is not None and projection is not None and projection.of == "raw_sum":
            x = self.projection(x)
        if self.norm is not None and not first:
            x = self.norm(x)
        if self.projection is not None and projection is not None and projection.of == "sum":
            x = self.projection(x)
        if self.training and self.config.dropout:
            x = dropped(x, self.config.dropout)
        if self.prefix is not None:
            x = torch.cat((self.prefix.expand(len(x), -1, -1), x), dim=1)
        return x if self.soft_prompt is None else self.soft_prompt(x)

    def _before_projection(self, x: Tensor, lengths: Tensor | None, neighbours: int) -> Tensor:
        """What stands side by side where tokens are projected."""
        if neighbours:
            x = _with_neighbours(x, lengths, neighbours)
        rows = [
            cast(nn.Embedding, table).weight[0].expand(*x.shape[:2], -1)
            for table, each in zip(self.first_rows, self.config.first_rows, strict=True)
            if each.dim is not None
        ]
        return torch.cat((x, *rows), dim=-1) if rows else x

    def _of_segments(self, ids: Tensor, segments: Tensor) -> Tensor:
        count = self.config.num_segments
        if self.segments is None:
            raise ValueError("this model has no segments (num_segments=0): got segments")
        if segments.shape != ids.shape:
            raise ValueError(
                f"segments must be [B, T] = {list(ids.shape)} as ids: got {list(segments.shape)}"
            )
        if segments.numel() and not 0 <= int(segments.min()) <= int(segments.max()) < count:
            raise ValueError(
                f"segments must be 0 to {count - 1}: got {int(segments.min())} to "
                f"{int(segments.max())}"
            )
        vectors: Tensor = self.segments(segments)
        return vectors


class SoftPrompt(Fixed):
    """Learned vectors in front of a text, and the segments of both.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Sizes, and which rows are added.
    """

    def __init__(self, embed_dim: int, config: SoftPromptConfig) -> None:
        super().__init__()
        self.config = config
        self.vectors = nn.Embedding(config.num_prompts * config.length, embed_dim)
        self.segments = nn.Embedding(config.num_segments, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, length + T, E]`` of ``[B, T, E]``."""
        length, (own, text) = self.config.length, self.config.segments
        first = self.config.chosen * length
        prompt = self.vectors.weight[first : first + length] + self.segments.weight[own]
        return torch.cat((prompt.expand(len(x), -1, -1), x + self.segments.weight[text]), dim=1)


def _with_neighbours(x: Tensor, lengths: Tensor | None, count: int) -> Tensor:
    """Tokens side by side, from ``count`` ahead to ``count`` behind; padding counts as zeros."""
    T = x.shape[1]
    if lengths is not None:
        padding = torch.arange(T, device=x.device) >= lengths[:, None]
        x = x.masked_fill(padding[..., None], 0.0)
    wide = F.pad(x, (0, 0, count, count))
    return torch.cat([wide[:, first : first + T] for first in range(2 * count, -1, -1)], dim=-1)


def _without_masked(
    x: Tensor, ids: Tensor, lengths: Tensor | None, config: TokenDropoutConfig
) -> Tensor:
    """Masked tokens as zeros, the others greater by as much as those make the sum smaller."""
    masked = ids == config.token_id
    if lengths is None:
        share = masked.float().mean(dim=-1)
    else:
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        share = (masked & real).sum(dim=-1) / lengths
    x = x.masked_fill(masked[..., None], 0.0)
    return (x * (1 - config.share) / (1 - share)[:, None, None]).to(x.dtype)
