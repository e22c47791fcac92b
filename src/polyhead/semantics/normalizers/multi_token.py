"""Multi-token attention: weights depend on scores of neighbouring queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.semantics.normalizer import Normalizer, by_position, check_numbers
from polyhead.semantics.normalizers.talking_heads import mix_heads
from polyhead.semantics.reference import softmax
from polyhead.semantics.tokens import Tokens


class MultiToken(Normalizer, arguments={"kernel": Tensor, "after": Tensor | None}):
    """softmax(Σ_ab kernel_ab score_(i − a)(j + K // 2 − b)), a < Q, b < K.

    Keys come in the order of their positions; a pair that is not seen counts as 0. Golovneva et al.
    2025, "Multi-Token Attention", arXiv 2504.00927, §3. The Q − 1 queries before the first one
    count as seeing nothing: a call that goes on with a text repeats them in front.

    Args:
        kernel: ``[H, Q, K]`` of each head; kernel[:, 0, K // 2] is of the pair itself.
        after: ``[H, H]`` mixes weights, of heads in its columns; None: they are not mixed.
    """

    def __init__(self, kernel: Tensor, after: Tensor | None = None) -> None:
        check_numbers("MultiToken kernel", kernel, "[H, Q, K]")
        if not kernel.shape[1]:
            raise ValueError(f"MultiToken kernel needs a query: got {list(kernel.shape)}")
        if after is not None:
            check_numbers("MultiToken after", after, "[H, H]")
        if after is not None and after.shape != (len(kernel), len(kernel)):
            raise ValueError(
                f"MultiToken after must be [H, H] with H = {len(kernel)} of the kernel: got "
                f"{list(after.shape)}"
            )
        self.kernel, self.after = kernel, after
        self.queries_before, self.mixes_heads = kernel.shape[1] - 1, after is not None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.kernel,) if self.after is None else (self.kernel, self.after)

    def of_heads(self, heads: Sequence[int]) -> MultiToken:
        if self.after is None:
            return MultiToken(self.kernel[list(heads)])
        if list(heads) != list(range(len(self.kernel))):
            raise UnsupportedError(f"some heads of {self!r}: each depends on all")
        return self

    def check(self, batch: int, heads: int, queries: int) -> None:
        if len(self.kernel) != heads:
            raise ValueError(
                f"MultiToken kernel must be [H, Q, K] with H = {heads}: got "
                f"{list(self.kernel.shape)}"
            )

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        hidden = scores.isneginf()
        mixed = by_position(self._convolved, scores.masked_fill(hidden, 0.0), k)
        weights, _ = softmax(mixed.masked_fill(hidden, -torch.inf))
        return weights if self.after is None else mix_heads(weights, self.after)

    def _convolved(self, scores: Tensor) -> Tensor:
        _, rows, columns = self.kernel.shape
        left = columns - 1 - columns // 2
        padded = F.pad(scores, (left, columns - 1 - left, rows - 1, 0))
        # torch correlates: the kernel is read backwards.
        by = self.kernel.to(scores).flip(1, 2)[:, None]
        return F.conv2d(padded, by, groups=len(by))

    def __repr__(self) -> str:
        said = "" if self.after is None else f", after={list(self.after.shape)}"
        return f"MultiToken(kernel={list(self.kernel.shape)}{said})"
