"""A small vector of every token for each layer, beside the residual stream (Gemma 3n and 4: PLE).

    p_l = (norm(x_0 Wp / √E)_l + table[id]_l · √P) / √2       for layer l
    x   = x + norm(act(x Wg) · p_l) Wo)                       at the end of layer l

The stream thereby stays narrow while a token's own numbers, which are only looked up, are many.

Shape letters: B batch, T tokens, L layers, P features of a vector, E embed size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyhead.config import PerLayerEmbeddingConfig, PerLayerInputConfig
from polyhead.config.layout import EMBEDDING
from polyhead.layers.feed_forward import activate
from polyhead.layers.fixed import Fixed
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm

READS = {"per_layer_input": EMBEDDING}


class PerLayerEmbedding(Fixed):
    """Ids and their embedding to ``[B, T, L, P]``.

    Args:
        embed_dim: Embedding size E of the residual stream.
        num_layers: L.
        config: Sizes and norm.
    """

    def __init__(self, embed_dim: int, num_layers: int, config: PerLayerEmbeddingConfig) -> None:
        super().__init__()
        self.config, self.num_layers = config, num_layers
        width = num_layers * config.dim
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.projection = nn.Linear(embed_dim, width, bias=False)
        self.norm = build_norm(config.dim, config.norm)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """``[B, T]`` and ``[B, T, E]`` to ``[B, T, L, P]``."""
        shape = (*ids.shape, self.num_layers, self.config.dim)
        made: Tensor = linear(x, self.projection) * x.shape[-1] ** -0.5
        made = self.norm(made.view(shape))
        # Rounded to the weights' dtype first, as the embedding's own scale is.
        scale = torch.full((), math.sqrt(self.config.dim), dtype=x.dtype, device=x.device)
        # Ids beyond the table, which are no text, read its first row.
        ids = torch.where((ids >= 0) & (ids < self.config.vocab_size), ids, 0)
        made = made + (self.tokens(ids) * scale).view(shape)
        return made * 2**-0.5


class PerLayerInput(Fixed):
    """Adds what a layer makes of its vector; see the module.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Sizes, activation and norm.
    """

    def __init__(self, embed_dim: int, config: PerLayerInputConfig) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(embed_dim, config.dim, bias=False)
        self.o_proj = nn.Linear(config.dim, embed_dim, bias=False)
        self.norm = build_norm(embed_dim, config.norm)
        if config.input_scale:
            self.input_scale = nn.Parameter(torch.zeros(embed_dim))

    def reset_parameters(self) -> None:
        if self.config.input_scale:
            nn.init.zeros_(self.input_scale)

    def forward(self, x: Tensor, handed: Handed | None) -> Tensor:
        """``[B, T, E]`` to the same.

        Raises:
            ValueError: The layer was called by itself.
        """
        return x + self.made(x, handed)

    def made(self, x: Tensor, handed: Handed | None) -> Tensor:
        """What is added to ``x``; takes the arguments of a call."""
        vectors: Tensor = handed_to(handed, "per_layer_input", READS)
        assert handed is not None
        if self.config.input_scale:
            x = x * self.input_scale
        h: Tensor = activate(linear(x, self.gate_proj), self.config.activation)
        h = linear(h * vectors[:, :, handed.layer], self.o_proj)
        made: Tensor = self.norm(h)
        return made
