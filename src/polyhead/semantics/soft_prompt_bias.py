"""A bias by distance within a soft prompt and within the text behind it (CPM-Ant)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.semantics.biases import RelativeBias
from polyhead.semantics.pairs import Pair, PairExpr, QueryKeyPairs


class SoftPromptBias(
    RelativeBias, arguments={"table": Tensor, "apart": Tensor, "length": int, "max_distance": int}
):
    """``RelativeBias`` within a prompt and within its text, one number for each head between them.

    Positions below ``length`` are the prompt's.

    Args:
        table: ``[num_buckets, H]``; keys ahead have buckets of their own.
        apart: ``[2, H]``: where the prompt looks at the text, and where the text looks at the
            prompt.
        length: Vectors of the prompt.
        max_distance: Distances from here on share the last bucket.

    Raises:
        ValueError: As of ``RelativeBias``, or ``apart`` of another shape.
    """

    def __init__(
        self, table: Tensor, apart: Tensor, *, length: int, max_distance: int = 128
    ) -> None:
        super().__init__(table, max_distance=max_distance)
        if apart.shape != (2, table.shape[1]):
            raise ValueError(f"apart must be [2, {table.shape[1]}]: got {list(apart.shape)}")
        self.apart, self.length = apart, length

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.table, self.apart

    def with_tensors(self, tensors: Sequence[Tensor]) -> SoftPromptBias:
        return SoftPromptBias(*tensors, length=self.length, max_distance=self.max_distance)

    def of_heads(self, heads: Sequence[int]) -> SoftPromptBias:
        return self.with_tensors([each[:, list(heads)] for each in self.tensors])

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        like = torch.empty(0, device=of.device, dtype=of.dtype)
        numbers = torch.cat((self.by_distance(like), self.apart.to(like).mT), dim=1)
        q, k = of.q_position, of.k_position
        most, length = of.number(self.max_distance), of.number(self.length)

        def column(pair: Pair) -> Tensor:
            far, of_text = most(pair), q(pair) >= length(pair)
            near: Tensor = (k(pair) - q(pair)).clamp(-far, far) + far
            same = of_text == (k(pair) >= length(pair))
            return torch.where(same, near, 2 * far + 1 + of_text.to(near.dtype))

        return of.look_up(numbers[None], column)

    def __repr__(self) -> str:
        return (
            f"SoftPromptBias({list(self.table.shape)}, length={self.length}, "
            f"max_distance={self.max_distance})"
        )
