"""Contextual position encoding (CoPE): positions that count what a query looks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.semantics.normalizer import Normalizer, check_numbers, sums_of_later
from polyhead.semantics.reference import softmax
from polyhead.semantics.tokens import Tokens


class CoPE(Normalizer, arguments={"of_query": Tensor}):
    """softmax(score_ij + of_query_i[p_ij]), p_ij = Σ_l σ(score_il) over the seen keys l from j on.

    p, at most n − 1, falls between two columns, whose numbers are interpolated. Golovneva et al.
    2024, "Contextual Position Encoding: Learning to Count What's Important", arXiv 2405.18719,
    eq. 2 to 5.

    Args:
        of_query: ``[1 or B, 1 or H, T, n]`` q_i · e[p] of each query and whole position.
    """

    def __init__(self, of_query: Tensor) -> None:
        check_numbers("CoPE of_query", of_query, "[B, H, T, n]")
        self.of_query = of_query

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.of_query,)

    def of_heads(self, heads: Sequence[int]) -> CoPE:
        return self if self.of_query.shape[1] == 1 else CoPE(self.of_query[:, list(heads)])

    def check(self, batch: int, heads: int, queries: int) -> None:
        rows, its_heads, length, _ = self.of_query.shape
        if rows not in (1, batch) or its_heads not in (1, heads) or length != queries:
            raise ValueError(
                f"CoPE of_query must be [1 or B, 1 or H, T, n] with B = {batch}, H = {heads}, "
                f"T = {queries}: got {list(self.of_query.shape)}"
            )

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        table = self.of_query[:, :, q.start : q.start + q.length].to(scores)
        table = table.expand(*scores.shape[:3], -1)
        at = sums_of_later(torch.sigmoid(scores), k).clamp(max=table.shape[-1] - 1)
        low, high = at.floor().long(), at.ceil().long()
        share = at - low
        added = table.gather(-1, low) * (1.0 - share) + table.gather(-1, high) * share
        return softmax(scores + added)[0]

    def __repr__(self) -> str:
        return f"CoPE(of_query={list(self.of_query.shape)})"
