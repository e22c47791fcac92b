"""Disentangled attention: scores of content with content, and of content with distances.

    score_ij = (q_i · k_j + q_i · K_n + k_j · Q_n) · scale      n: the column of i − j
    K = R Wk        Q = R Wq        R: the model's vectors of distances

He et al. 2021, "DeBERTa". The last two terms are a ``RelativeContentBias``: tables of tokens ×
distances, looked up tile by tile. Wk and Wq are those of the content, or others.

Shape letters: B batch, H query heads, G kv heads, T tokens, D head size, E embed size,
n distances.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from polyhead.config import AttentionConfig, DisentangledAttentionConfig, RelativeEmbeddingConfig
from polyhead.config.disentangled import DISTANCES
from polyhead.errors import UnsupportedError
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.fixed import Fixed
from polyhead.layers.fused import dropped
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, DenseSource, Mask, RelativeContentBias


class Distances(NamedTuple):
    """What a model hands to its layers: vectors ``[n, E]``, and what they stand for."""

    vectors: Tensor
    config: RelativeEmbeddingConfig


class RelativeEmbedding(Fixed):
    """A learned vector for each distance.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Number, norm and meaning.
    """

    def __init__(self, embed_dim: int, config: RelativeEmbeddingConfig) -> None:
        super().__init__()
        self.config = config
        self.distances = nn.Embedding(config.num_distances, embed_dim)
        self.norm = None if config.norm is None else build_norm(embed_dim, config.norm)

    def forward(self) -> Distances:
        """The vectors of all distances."""
        vectors: Tensor = self.distances.weight
        return Distances(vectors if self.norm is None else self.norm(vectors), self.config)


class DisentangledAttention(MultiHeadAttention):
    """``MultiHeadAttention`` of an encoder that also scores distances; built from its config.

    With ``own_projections`` it has ``distance_k_proj`` and ``distance_q_proj``. The model hands it
    the vectors of distances.
    """

    config_class: ClassVar[type[AttentionConfig]] = DisentangledAttentionConfig
    config: DisentangledAttentionConfig

    distance_k_proj: nn.Linear
    distance_q_proj: nn.Linear

    def _add_modules(self) -> None:
        config, E, D = self.config, self.embed_dim, self.head_dim
        if config.own_projections and config.query_term:
            self.distance_k_proj = nn.Linear(E, self.num_kv_heads * D, bias=config.has_k_bias)
        if config.own_projections and config.key_term:
            self.distance_q_proj = nn.Linear(E, self.num_heads * D, bias=config.qkv_bias)

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *more: Tensor,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Any = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``.

        Args:
            x: ``[B, T, E]``.
            context: None.
            *more: Refused.
            mask: Who may look at whom; None: everything is visible.
            bias: None: the layer has its own.
            positions: ``[T]`` or ``[B, T]``; default 0 … T − 1.
            context_positions: None.
            cache: None.
            kernel: ``"auto"`` or the name of a kernel.
            handed: What the model hands on, with the vectors of distances.
            **unknown: Refused.

        Raises:
            UnsupportedError: A context, a cache or a bias.
            ValueError: Shapes that do not fit, or a call of the layer outside its model.
        """
        if more or unknown or x.ndim != 3 or x.shape[2] != self.embed_dim:
            return super().forward(x, context, *more, **unknown)  # which says why
        for name, given in (("context", context), ("cache", cache), ("bias", bias)):
            if given is not None or context_positions is not None:
                raise UnsupportedError(
                    f"{type(self).__name__} is an encoder's self-attention with a bias of its own: "
                    f"got {name}"
                )
        q, k, v = self._project(x, 0)
        q, own = self._scored(q, k, positions, handed)
        return self._answered(x, q, DenseSource(k, v, positions), mask, own, positions, kernel)

    def _scored(
        self, q: Tensor, k: Tensor, positions: Tensor | None, handed: Handed | None
    ) -> tuple[Tensor, RelativeContentBias]:
        """Queries as keys see them, and what distances add to the scores."""
        vectors, config = handed_to(handed, DISTANCES, self.config.reads)
        if self.training and config.dropout:
            vectors = dropped(vectors, config.dropout)
        own, of_query, of_key = self.config.own_projections, None, None
        if self.config.query_term:
            of_query = self._table(q, vectors, self.distance_k_proj if own else self.k_proj)
        if self.config.key_term:
            of_key = self._table(k, vectors, self.distance_q_proj if own else self.q_proj)
        return q, RelativeContentBias(of_query, of_key, max_distance=config.max_distance)

    def _table(self, tokens: Tensor, vectors: Tensor, projection: nn.Linear) -> Tensor:
        """``[B, H, T, n]`` scores of queries, or of keys, with all distances.

        Heads of a group share either the tokens' side or that of the distances.
        """
        (B, heads, T, D), n = tokens.shape, len(vectors)
        groups, others = self.num_kv_heads, linear(vectors, projection).view(n, -1, D)
        rows = tokens.reshape(B, groups, heads // groups, T, D) * self.scale
        columns = others.permute(1, 2, 0).reshape(groups, -1, D, n)
        return (rows @ columns).view(B, self.num_heads, T, n)


register_builder(DisentangledAttentionConfig, DisentangledAttention.from_config)
