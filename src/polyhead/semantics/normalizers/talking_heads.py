"""Talking-heads attention: heads are mixed before and after the softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.semantics.normalizer import Normalizer, check_numbers
from polyhead.semantics.reference import softmax
from polyhead.semantics.tokens import Tokens


class TalkingHeads(Normalizer, arguments={"before": Tensor | None, "after": Tensor | None}):
    """weights_g = Σ_h after_gh softmax(Σ_f before_hf score_f).

    Shazeer et al. 2020, "Talking-Heads Attention", arXiv 2003.02436.

    Args:
        before: ``[H, H]``, scores of heads in its columns; None: scores are not mixed.
        after: ``[H, H]``, weights of heads in its columns; None: weights are not mixed.
    """

    mixes_heads = True

    def __init__(self, before: Tensor | None = None, after: Tensor | None = None) -> None:
        self.before, self.after = before, after
        if not self.tensors:
            raise ValueError("TalkingHeads needs before, after or both: got neither")
        for name, x in (("before", before), ("after", after)):
            if x is not None:
                check_numbers(f"TalkingHeads {name}", x, "[H, H]")
            if x is not None and x.shape[0] != x.shape[1]:
                raise ValueError(f"TalkingHeads {name} must be [H, H]: got {list(x.shape)}")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.before, self.after) if x is not None)

    def of_heads(self, heads: Sequence[int]) -> TalkingHeads:
        if list(heads) != list(range(len(self.tensors[0]))):
            raise UnsupportedError(f"some heads of {self!r}: each depends on all")
        return self

    def check(self, batch: int, heads: int, queries: int) -> None:
        for x in self.tensors:
            if len(x) != heads:
                raise ValueError(f"{self!r} needs {len(x)} heads: got {heads}")

    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        hidden = scores.isneginf()
        if self.before is not None:
            scores = mix_heads(scores.masked_fill(hidden, 0.0), self.before)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights, _ = softmax(scores)
        return weights if self.after is None else mix_heads(weights, self.after)

    def __repr__(self) -> str:
        named = (("before", self.before), ("after", self.after))
        said = ", ".join(f"{name}={list(x.shape)}" for name, x in named if x is not None)
        return f"TalkingHeads({said})"


def mix_heads(x: Tensor, by: Tensor) -> Tensor:
    """``[B, H, T, S]`` sums over the heads of x, by the rows of ``[H, H]``."""
    return torch.einsum("hf,bfts->bhts", by.to(x), x)
